"""From templates to pipelines: which and how many, and how the batch is split over them."""
