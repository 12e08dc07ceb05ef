"""What a model is made of: repeated blocks, embeddings, head, tied weights, and what they allow."""
