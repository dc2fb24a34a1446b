package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// What scaling has to reach.
const (
	targetConnectCPU = 8.0  // times less than go-nsq, at least
	targetRDYs       = 2.0  // commands for each nsqd to connect, at most
	targetConnBytes  = 20.0 // KiB of heap and stacks for each connection, at most

	// Costs are linear if an nsqd of a larger fleet costs at most linearSlack times as much as one of linearFrom nsqds. With fewer, what
	// does not depend on their number hides what does. What grows with the square costs 5 times as much with 500, and 10 times with
	// 1000; the slack lies between that and the noise of CPU times.
	linearFrom  = 100
	linearSlack = 3.0

	flatSlack = 2.0 // the same for what should not grow at all, and is not divided
)

// cost is something that may grow with the number of nsqds.
type cost struct {
	name string
	of   func(fleetRun) float64 // for all nsqds together; unknown if it is
	flat bool                   // it is not for all together, and should not grow at all
}

var costs = []cost{
	{name: "connecting: time, ms", of: func(r fleetRun) float64 { return milliseconds(r.ready) }},
	{name: "connecting: CPU, ms", of: func(r fleetRun) float64 { return cpuFigure(milliseconds(r.connectCPU)) }},
	{name: "connecting: RDY commands", of: func(r fleetRun) float64 { return float64(r.rdys) }},
	{name: "live heap and stacks, KiB", of: func(r fleetRun) float64 { return r.bytes / 1024 * float64(r.nsqds) }},
	{name: "goroutines", of: func(r fleetRun) float64 { return r.goroutines * float64(r.nsqds) }},
	{name: "idle: CPU, us per second", of: func(r fleetRun) float64 { return cpuFigure(r.idleCPU * 1e6) }},
	{name: "heartbeats: CPU, us per second", of: func(r fleetRun) float64 { return cpuFigure(r.beatCPU * 1e6) }},
	{name: "a busy nsqd gets its RDY: time, ms", of: func(r fleetRun) float64 { return milliseconds(r.busy) }, flat: true},
	{name: "a round of turns: time, ms", of: func(r fleetRun) float64 { return roundFigure(r, milliseconds(r.round)) }},
	{name: "turns: CPU, us per second", of: func(r fleetRun) float64 { return roundFigure(r, cpuFigure(r.roundCPU*1e6)) }},
	{name: "turns, all busy: CPU per message, us", of: func(r fleetRun) float64 { return roundFigure(r, cpuFigure(1000*milliseconds(r.busyCPU))) }, flat: true},
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// cpuFigure is f where CPU time can be measured.
func cpuFigure(f float64) float64 {
	if processCPU() == unknown {
		return unknown
	}
	return f
}

// roundFigure is f if there were turns.
func roundFigure(r fleetRun, f float64) float64 {
	if r.round == 0 {
		return unknown
	}
	return f
}

// sampleOf takes one figure out of each run.
func sampleOf(runs []fleetRun, of func(fleetRun) float64) (s sample) {
	for _, r := range runs {
		if f := of(r); f != unknown {
			s = append(s, f)
		}
	}
	return s
}

// linear says "yes" or "no", and "-" if that can't be told. costs are those of one nsqd, by the size of the fleet.
func linear(fleets []int, costs map[int]float64, slack float64) string {
	base, known := costs[linearFrom]
	verdict := "-"
	for _, n := range fleets {
		cost, ok := costs[n]
		switch {
		case !known || !ok || n <= linearFrom:
		case cost > slack*base:
			return "no"
		default:
			verdict = "yes"
		}
	}
	return verdict
}

// printScale prints all tables. It returns how many targets were missed.
func printScale(w io.Writer, o scaleOptions, result *scaleResult) (missed int, err error) {
	tables := []func(scaleOptions, *scaleResult) (t table, foot string, missed int){fleetTable, growthTable, comparisonTable}
	for _, f := range tables {
		t, foot, n := f(o, result)
		missed += n
		if len(t.rows) == 0 {
			continue
		}
		if err := t.print(w); err != nil {
			return missed, err
		}
		if _, err := fmt.Fprintf(w, "%s\n\n", foot); err != nil {
			return missed, err
		}
	}
	return missed, nil
}

// fleetTable shows what a consumer of each fleet takes.
func fleetTable(o scaleOptions, result *scaleResult) (t table, foot string, missed int) {
	t = table{title: "One consumer of many nsqds", header: []string{"nsqds"}}
	for _, c := range costs {
		t.header = append(t.header, c.name)
	}
	t.header = append(t.header, "RDY of the busy nsqd")
	for _, n := range o.fleets {
		runs := result.ours[n]
		cells := []string{fmt.Sprint(n)}
		for _, c := range costs {
			cells = append(cells, sampleOf(runs, c.of).String())
		}
		t.add(append(cells, fmt.Sprint(runs[0].busyRDY))...)
	}
	return t, fmt.Sprintf("Medians of %d runs. Fake nsqds in a process of their own; what is shown is the consumer's process. Max-in-flight is %d, but for the "+
		"turns, where it is %d. The round is bound by the number of turns that fit into it: RDYTurnIdle is %s here, 500ms by default. The busy "+
		"nsqd gets its RDY after RDYRedistributeInterval, %s here, 5s by default. Heartbeats come every %s, 30s by default.",
		o.runs, scaleMaxInFlight, turnsMaxInFlight, o.turn, o.look, o.heart), 0
}

// growthTable shows the same for one nsqd, and whether it is linear.
func growthTable(o scaleOptions, result *scaleResult) (t table, foot string, missed int) {
	t = table{title: "The same, divided by the number of nsqds", header: []string{"for each of the nsqds"}}
	for _, n := range o.fleets {
		t.header = append(t.header, fmt.Sprint(n))
	}
	t.header = append(t.header, "linear")
	for _, c := range costs {
		cells := []string{c.name}
		divided, slack := make(map[int]float64), linearSlack
		if c.flat {
			slack = flatSlack
		}
		for _, n := range o.fleets {
			f := sampleOf(result.ours[n], c.of).median() // NaN if unknown
			if !c.flat {
				f /= float64(n)
			}
			if !math.IsNaN(f) {
				divided[n] = f
			}
			cells = append(cells, figure(f))
		}
		verdict := linear(o.fleets, divided, slack)
		if verdict == "no" {
			missed++
		}
		t.add(append(cells, verdict)...)
	}
	return t, fmt.Sprintf("Linear: one of more than %d nsqds costs at most %g times as much as one of %d. The time until "+
		"a busy nsqd has its RDY and the CPU per message are not divided, and may grow to %g times as much.", linearFrom, linearSlack, linearFrom, flatSlack), missed
}

// comparisonTable shows both libraries with one fleet.
func comparisonTable(o scaleOptions, result *scaleResult) (t table, foot string, missed int) {
	if len(result.goNSQ) == 0 {
		return t, "", 0
	}
	t = table{
		title:  fmt.Sprintf("%d nsqds, compared with go-nsq", o.compared),
		header: []string{"", ours, goNSQ, "ratio", "target", "target met"},
	}
	mine, others := result.ours[o.compared], result.goNSQ
	add := func(name string, of func(fleetRun) float64, target string, met func(mine, ratio sample) bool) {
		a, b := sampleOf(mine, of), sampleOf(others, of)
		var ratio sample
		for i := range min(len(a), len(b)) {
			if a[i] > 0 {
				ratio = append(ratio, b[i]/a[i])
			}
		}
		verdict := "-"
		switch {
		case met == nil:
		case met(a, ratio):
			verdict = "yes"
		default:
			verdict = "no"
			missed++
		}
		t.add(name, a.String(), b.String(), ratio.ratios(), target, verdict)
	}
	add("connecting: CPU, ms", func(r fleetRun) float64 { return cpuFigure(milliseconds(r.connectCPU)) },
		fmt.Sprintf(">= %gx less", targetConnectCPU), func(_, ratio sample) bool { return ratio.median() >= targetConnectCPU })
	add("connecting: RDY commands for each", func(r fleetRun) float64 { return float64(r.rdys) / float64(r.nsqds) },
		fmt.Sprintf("<= %g", targetRDYs), func(mine, _ sample) bool { return mine.median() <= targetRDYs })
	add("connecting: time, ms", func(r fleetRun) float64 { return milliseconds(r.ready) }, "-", nil)
	add("live heap and stacks for each, KiB", func(r fleetRun) float64 { return r.bytes / 1024 },
		fmt.Sprintf("<= %g", targetConnBytes), func(mine, _ sample) bool { return mine.median() <= targetConnBytes })
	add("goroutines for each", func(r fleetRun) float64 { return r.goroutines }, "-", nil)
	add("idle: CPU, us per second", func(r fleetRun) float64 { return cpuFigure(r.idleCPU * 1e6) }, "-", nil)
	return t, strings.Join([]string{
		"Both connect by ConnectToNSQDs, go-nsq to one nsqd after the other. Ratio: go-nsq's figure by ours, run by run (lowest to highest).",
		"Connecting is over when each nsqd has its RDY and no more commands come.",
	}, " "), missed
}
