package main

import (
	"fmt"
	"io"
	"strings"
)

// target is what a row should reach, by medians. Zero stands for none.
type target struct {
	rate    float64 // times go-nsq's messages a second, at least
	cpu     float64 // times less CPU for a message than go-nsq, at least
	writes  float64 // for a message, at most
	mallocs float64 // for a message, at most
}

func (t target) String() string {
	var parts []string
	add := func(format string, limit float64) {
		if limit != 0 {
			parts = append(parts, fmt.Sprintf(format, limit))
		}
	}
	add(">= %gx msg/s", t.rate)
	add(">= %gx less CPU", t.cpu)
	add("<= %g writes", t.writes)
	add("<= %g allocs", t.mallocs)
	return strings.Join(parts, ", ")
}

// missed names what does not reach the target. What is unknown does not.
func (t target) missed(f figures) []string {
	var names []string
	check := func(name string, limit float64, met bool) {
		if limit != 0 && !met {
			names = append(names, name)
		}
	}
	check("msg/s", t.rate, f.rateRatio.median() >= t.rate)
	check("CPU", t.cpu, f.cpuRatio.median() >= t.cpu)
	check("writes", t.writes, f.ours.writes.median() <= t.writes)
	check("allocs", t.mallocs, f.ours.mallocs.median() <= t.mallocs)
	return names
}

// columns are the figures of a library's runs.
type columns struct{ rate, cpu, reads, writes, mallocs, gc sample }

func newColumns(results []result) (c columns) {
	add := func(s *sample, f float64) {
		if f != unknown {
			*s = append(*s, f)
		}
	}
	for _, r := range results {
		add(&c.rate, r.rate)
		add(&c.cpu, r.cpu)
		add(&c.reads, r.reads)
		add(&c.writes, r.writes)
		add(&c.mallocs, r.mallocs)
		add(&c.gc, r.gc)
	}
	return c
}

// figures are what a row shows: one library's runs, and another's that ran beside it.
type figures struct {
	ours, other columns
	rateRatio   sample // run by run: the two were next to each other in time
	cpuRatio    sample
}

func newFigures(ours, other []result) figures {
	f := figures{ours: newColumns(ours), other: newColumns(other)}
	for i := range ours {
		f.rateRatio = append(f.rateRatio, ours[i].rate/other[i].rate)
		if ours[i].cpu > 0 && other[i].cpu > 0 {
			f.cpuRatio = append(f.cpuRatio, other[i].cpu/ours[i].cpu)
		}
	}
	return f
}

// printConsume prints a row for each workload, and one for the noise where that was measured. It returns how many missed their target.
func printConsume(w io.Writer, rows []workload, results []map[string][]result) (missed int, err error) {
	t := table{header: []string{
		"workload", "msg/s, times go-nsq's", "times less CPU per message", "msg/s", "CPU per message, us", "floor: msg/s", "floor: CPU, us", "writes per message", "reads per message",
		"allocations per message", "GC share, %", "target", "target met",
	}}
	cells := func(name string, f figures, floor columns) []string {
		both := func(ours, other sample) string { return fmt.Sprintf("%s / %s", ours, other) }
		return []string{
			name, f.rateRatio.ratios(), f.cpuRatio.ratios(), both(f.ours.rate, f.other.rate), both(f.ours.cpu, f.other.cpu), floor.rate.String(), floor.cpu.String(),
			both(f.ours.writes, f.other.writes), both(f.ours.reads, f.other.reads), both(f.ours.mallocs, f.other.mallocs), both(f.ours.gc, f.other.gc),
		}
	}
	for i, row := range rows {
		f := newFigures(results[i][ours], results[i][goNSQ])
		met := "yes"
		if names := row.target.missed(f); len(names) > 0 {
			met = "no: " + strings.Join(names, ", ")
			missed++
		}
		t.add(append(cells(row.name, f, newColumns(results[i][floor])), row.target.String(), met)...)
		if row.noise {
			t.add(append(cells("noise: ours / ours again", newFigures(results[i][ours], results[i][again]), columns{}), "-", "-")...)
		}
	}
	if err := t.print(w); err != nil {
		return missed, err
	}
	note := "Medians of all runs (and lowest to highest). a / b: this library / go-nsq. CPU, reads, writes and allocations are those of the client process."
	if processCPU() == unknown {
		note += "\nCPU time can't be measured on this system, so targets that are about it are missed."
	}
	_, err = fmt.Fprintf(w, "%s\n\n", note)
	return missed, err
}
