//go:build race

package soak

// defaultMessages is less under the race detector, which is several times slower, and of which CI has three runs.
const defaultMessages = 20_000
