//go:build unix

package main

import (
	"syscall"
	"time"
)

// processCPU is the CPU time of this process, in user mode and in the system.
func processCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return unknown
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
