"""Attention on sm_90 in Gluon: TMA, wgmma, and warps with separate tasks."""
