"""Operator fusion for TVM: vertical and horizontal groups as annotations, one kernel per group."""
