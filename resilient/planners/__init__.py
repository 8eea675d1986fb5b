"""Multimodal planners: which samples go where, from their lengths alone (numpy; no torch, no processes).

Every planner decides once how a job uses its devices (``configure``) and in every step where each sample goes
(``assign``); see :mod:`resilient.planners.planner`. All of them read the same sample table and the same cost model.
"""
