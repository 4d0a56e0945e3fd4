"""Samples of trees: their files, distances, consensus trees and plots."""
