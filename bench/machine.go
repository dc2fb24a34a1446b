package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
)

// machine describes where this runs, in a line.
func machine() string {
	s := fmt.Sprintf("%d cores", runtime.NumCPU())
	if model := cpuModel(); model != "" {
		s += " of " + model
	}
	s += fmt.Sprintf(", %s, %s/%s", runtime.Version(), runtime.GOOS, runtime.GOARCH)
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		s += ", kernel " + strings.TrimSpace(string(release))
	}
	return s
}

// cpuModel is what Linux says; other systems have other ways, and the name is only for people.
func cpuModel() string {
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(data)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
