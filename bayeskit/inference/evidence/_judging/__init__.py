"""What an estimate is judged by once its estimator has returned it: warnings, and whether it is trusted.

Numeric diagnostics look at what one estimate was made of; a verdict sums up several estimates of one log evidence.
"""
