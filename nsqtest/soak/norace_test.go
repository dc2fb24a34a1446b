//go:build !race

package soak

const defaultMessages = 100_000
