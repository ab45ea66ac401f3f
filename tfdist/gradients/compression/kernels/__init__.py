"""Operations on tensors that several compression methods share: packing of bits and bytes, top-k, row reductions, draws.

They keep no state. Only `sparse_vector` communicates.
"""
