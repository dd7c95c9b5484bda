"""Layouts: one relation, hardware point -> tensor element, and what follows from it.

relation   the relation, its queries and transfer functions     normal    its normal form
fragment   tiles in registers                                   catalog   the hardware's own fragments
shared     tiles in shared memory, swizzles                     address   fragment -> shared: widths, conflicts
tma        boxes of tensor copies                               descriptor  matrix descriptors of wgmma
relayout   conversions between fragments                        notation  named-axis text     draw  pictures
"""
