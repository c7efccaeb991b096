"""The flights that left New York in 2013: real input, the views over it and the model of the demo."""
