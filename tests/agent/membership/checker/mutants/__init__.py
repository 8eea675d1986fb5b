"""Mistakes that the membership machine could have; are they told?"""
