package main

import (
	"fmt"
	"math"
	"slices"
)

// sample is a figure of several runs, without those in which it is unknown.
type sample []float64

func (s sample) median() float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// spread returns the smallest and the largest.
func (s sample) spread() (lowest, highest float64) {
	if len(s) == 0 {
		return math.NaN(), math.NaN()
	}
	return slices.Min(s), slices.Max(s)
}

// ratios is the median of ratios and their range, as "4.3x (4.1-4.6)".
func (s sample) ratios() string {
	if len(s) == 0 {
		return "-"
	}
	lowest, highest := s.spread()
	return fmt.Sprintf("%sx (%s-%s)", figure(s.median()), figure(lowest), figure(highest))
}

// String is the median, and "-" if nothing is known.
func (s sample) String() string { return figure(s.median()) }

// figure shows three digits, as much as noise leaves.
func figure(f float64) string {
	switch a := math.Abs(f); {
	case math.IsNaN(f):
		return "-"
	case a >= 99.95 || f == 0:
		return fmt.Sprintf("%.0f", f)
	case a >= 9.995:
		return fmt.Sprintf("%.1f", f)
	case a >= 0.9995:
		return fmt.Sprintf("%.2f", f)
	case a >= 0.09995:
		return fmt.Sprintf("%.3f", f)
	default:
		return fmt.Sprintf("%.4f", f)
	}
}
