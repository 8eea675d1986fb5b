"""From events and spans to status, report, trace and figures. Must not import torch."""
