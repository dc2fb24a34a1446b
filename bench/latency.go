package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
)

// latencySetting is a row: messages are published at a steady pace, far below what a consumer can take.
type latencySetting struct {
	name        string
	maxInFlight int
	unbuffered  bool
}

var latencySettings = []latencySetting{
	{name: "latency, max-in-flight 2500, nsqd's output buffer by default", maxInFlight: 2500},
	{name: "latency, max-in-flight 2500, nsqd's output buffer off", maxInFlight: 2500, unbuffered: true},
	{name: "latency, max-in-flight 1", maxInFlight: 1},
}

const (
	latencyPace  = 5_000  // messages a second
	latencyCount = 15_000 // measured
)

// latencyOnce measures a library with a setting, in new processes.
func latencyOnce(ctx context.Context, s latencySetting, library string, count int) (l latencies, rate float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	server, err := startChild(ctx, "latency-server")
	if err != nil {
		return latencies{}, 0, err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	var addr string
	if err := server.ask(struct{}{}, &addr); err != nil {
		return latencies{}, 0, err
	}
	client, err := startChild(ctx, "latency-client")
	if err != nil {
		return latencies{}, 0, err
	}
	defer func() { err = errors.Join(err, client.stop()) }()
	warm := warmUp(count)
	var subscribed struct{}
	err = client.ask(latencyClientConfig{
		Config: consumerConfig{Library: library, MaxInFlight: s.maxInFlight, Unbuffered: s.unbuffered}, Addr: addr, WarmUp: warm, Count: count,
	}, &subscribed)
	if err != nil {
		return latencies{}, 0, err
	}
	if err := server.ask(paceConfig{Messages: warm + count, PerSecond: latencyPace}, &rate); err != nil {
		return latencies{}, 0, err
	}
	err = client.ask(struct{}{}, &l)
	return l, rate, err
}

// latencyRuns are a library's runs with one setting.
type latencyRuns struct{ p50, p90, p99, max, cpu, rate sample }

func (r *latencyRuns) add(l latencies, rate float64) {
	r.p50 = append(r.p50, l.P50)
	r.p90 = append(r.p90, l.P90)
	r.p99 = append(r.p99, l.P99)
	r.max = append(r.max, l.Max)
	if l.CPU != unknown {
		r.cpu = append(r.cpu, l.CPU)
	}
	r.rate = append(r.rate, rate)
}

// notAbove tells whether a p50 reaches the target: not above go-nsq's. Medians that are closer together than half the range of either
// library's runs are not told apart.
func notAbove(mine, others sample) bool {
	half := func(s sample) float64 {
		lowest, highest := s.spread()
		return (highest - lowest) / 2
	}
	return mine.median() <= others.median()+max(half(mine), half(others))
}

// runLatency measures all settings and prints the table.
func runLatency(ctx context.Context, o options, out io.Writer) (missed int, err error) {
	var settings []latencySetting
	for _, s := range latencySettings {
		if o.wants(s.name) {
			settings = append(settings, s)
		}
	}
	if len(settings) == 0 {
		return 0, nil
	}
	libraries := []string{ours, goNSQ}
	results := make([]map[string]*latencyRuns, len(settings))
	for i := range results {
		results[i] = map[string]*latencyRuns{ours: {}, goNSQ: {}}
	}
	random := o.random()
	for round := range o.runs {
		fmt.Fprintf(o.log, "bench: latency: round %d of %d\n", round+1, o.runs)
		for _, i := range random.Perm(len(settings)) {
			for _, j := range random.Perm(len(libraries)) {
				l, rate, err := latencyOnce(ctx, settings[i], libraries[j], o.scaled(latencyCount))
				if err != nil {
					return 0, fmt.Errorf("%s, %s: %w", settings[i].name, libraries[j], err)
				}
				results[i][libraries[j]].add(l, rate)
			}
		}
	}
	return printLatency(out, settings, results)
}

func printLatency(w io.Writer, settings []latencySetting, results []map[string]*latencyRuns) (missed int, err error) {
	t := table{
		title:  fmt.Sprintf("From publishing to the handler, at %d messages a second", latencyPace),
		header: []string{"setting", "p50, us", "range of p50", "p90", "p99", "highest", "CPU per message, us", "msg/s", "p50 not above go-nsq's"},
	}
	for i, s := range settings {
		mine, others := results[i][ours], results[i][goNSQ]
		both := func(f func(*latencyRuns) sample) string { return fmt.Sprintf("%s / %s", f(mine), f(others)) }
		spread := func(s sample) string {
			lowest, highest := s.spread()
			return figure(lowest) + "-" + figure(highest)
		}
		met := "yes"
		if !notAbove(mine.p50, others.p50) {
			met = "no"
			missed++
		}
		t.add(s.name,
			both(func(r *latencyRuns) sample { return r.p50 }),
			spread(mine.p50)+" / "+spread(others.p50),
			both(func(r *latencyRuns) sample { return r.p90 }),
			both(func(r *latencyRuns) sample { return r.p99 }),
			both(func(r *latencyRuns) sample { return r.max }),
			both(func(r *latencyRuns) sample { return r.cpu }),
			both(func(r *latencyRuns) sample { return r.rate }),
			met)
	}
	if err := t.print(w); err != nil {
		return missed, err
	}
	_, err = fmt.Fprintln(w, strings.Join([]string{
		"Medians of all runs; a / b: this library / go-nsq. The time is taken just before PUB and first thing in the handler.",
		"\"Not above\": by no more than half the range of either library's runs.",
		"By default nsqd gathers up to 16 KiB for a connection, or for 250 ms, as long as RDY allows more messages: at this pace the buffer",
		"fills every 25 ms or so, and that is what the first row shows. With max-in-flight 1 nsqd sends each message at once, since no other may follow.",
	}, "\n"))
	return missed, err
}
