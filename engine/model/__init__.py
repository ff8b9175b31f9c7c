"""What the model is: weights from files, the forward pass, the tokenizer and the chat template."""
