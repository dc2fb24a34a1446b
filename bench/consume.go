package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// again is this library under a second name: how far the two are apart is noise.
const again = "ours again"

const (
	handlers   = 4
	runTimeout = 2 * time.Minute // of one run, far above what one takes
)

// workload is a row: both libraries consume the same from a server of the same kind.
type workload struct {
	name        string
	server      string // role
	maxInFlight int
	bodySize    int
	messages    int // measured, for this library
	messagesGo  int // measured, for go-nsq, which needs much longer for each
	tls         bool
	snappy      bool
	deflate     bool
	noise       bool // runs this library under two names
	target      target
}

var workloads = []workload{
	{name: "nsqd, 100 B, max-in-flight 2500", server: "server-nsqd", maxInFlight: 2500, bodySize: 100, messages: 430_000, messagesGo: 215_000,
		noise: true, target: target{rate: 4, cpu: 10, writes: 0.02, mallocs: 0.1}},
	{name: "nsqd, 100 B, max-in-flight 100", server: "server-nsqd", maxInFlight: 100, bodySize: 100, messages: 430_000, messagesGo: 215_000,
		target: target{rate: 4, cpu: 8, writes: 0.05, mallocs: 0.1}},
	{name: "nsqd, 1 KiB, max-in-flight 2500", server: "server-nsqd", maxInFlight: 2500, bodySize: 1 << 10, messages: 430_000, messagesGo: 215_000,
		target: target{rate: 3.5, cpu: 5}},
	{name: "nsqd, 100 B, max-in-flight 1", server: "server-nsqd", maxInFlight: 1, bodySize: 100, messages: 30_000, messagesGo: 30_000,
		target: target{rate: 1, cpu: 1}},
	{name: "fake, 100 B, max-in-flight 2500", server: "server-fake", maxInFlight: 2500, bodySize: 100, messages: 4_000_000, messagesGo: 200_000,
		noise: true, target: target{cpu: 30, writes: 0.02, mallocs: 0.1}},
	{name: "fake, 100 B, max-in-flight 100", server: "server-fake", maxInFlight: 100, bodySize: 100, messages: 1_500_000, messagesGo: 200_000,
		target: target{cpu: 12, writes: 0.05, mallocs: 0.1}},
	{name: "fake, 1 KiB, max-in-flight 2500", server: "server-fake", maxInFlight: 2500, bodySize: 1 << 10, messages: 1_000_000, messagesGo: 200_000,
		target: target{cpu: 10}},
	{name: "fake, 16 KiB, max-in-flight 2500", server: "server-fake", maxInFlight: 2500, bodySize: 16 << 10, messages: 40_000, messagesGo: 40_000,
		target: target{cpu: 1.5}},
	// 2500 of these would be 2.5 GiB in each process.
	{name: "fake, 1 MiB, max-in-flight 100", server: "server-fake", maxInFlight: 100, bodySize: 1 << 20, messages: 1_000, messagesGo: 1_000,
		target: target{cpu: 1.5}},
	{name: "fake, TLS, 100 B, max-in-flight 2500", server: "server-fake", maxInFlight: 2500, bodySize: 100, messages: 3_000_000, messagesGo: 200_000,
		tls: true, target: target{rate: 20}},
	{name: "fake, snappy, 100 B, max-in-flight 2500", server: "server-fake", maxInFlight: 2500, bodySize: 100, messages: 3_000_000, messagesGo: 150_000,
		snappy: true, target: target{rate: 60}},
	{name: "fake, deflate, 100 B, max-in-flight 2500", server: "server-fake", maxInFlight: 2500, bodySize: 100, messages: 1_500_000, messagesGo: 100_000,
		deflate: true, target: target{rate: 20}},
}

// warmUp is how many messages are not measured: connecting, the first RDY and the growth of buffers are over by then.
func warmUp(messages int) int { return max(1, messages/9) }

// leftOver is how many messages come after those that are measured: nsqd keeps the last ones back for the time of its output buffer.
func leftOver(messages int) int { return max(1, messages/20) }

// names are what is measured.
func (w workload) names() []string {
	names := []string{ours, goNSQ}
	if w.noise {
		names = append(names, again)
	}
	if w.withoutLayers() {
		names = append(names, floor)
	}
	return names
}

// result is what a run with a library gave, for each message.
type result struct {
	rate    float64 // messages a second
	cpu     float64 // microseconds
	reads   float64
	writes  float64
	mallocs float64
	gc      float64 // percent of the CPU time
}

func newResult(s spent, messages int) result {
	n := float64(messages)
	per := func(count int64) float64 {
		if count == unknown {
			return unknown
		}
		return float64(count) / n
	}
	r := result{
		rate:    n / s.Wall.Seconds(),
		cpu:     unknown,
		reads:   per(s.Reads),
		writes:  per(s.Writes),
		mallocs: per(s.Mallocs),
		gc:      100 * s.GCShare,
	}
	if s.CPU != unknown {
		r.cpu = float64(s.CPU) / float64(time.Microsecond) / n
	}
	return r
}

// runOnce measures a library with a workload, in new processes.
func runOnce(ctx context.Context, o options, w workload, name string, round int) (r result, err error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	library, count := name, o.scaled(w.messages)
	switch name {
	case again:
		library = ours
	case goNSQ:
		count = o.scaled(w.messagesGo)
	}
	warm, rest := warmUp(count), leftOver(count)
	profile := func(of string) string {
		if o.profile == "" {
			return ""
		}
		return filepath.Join(o.profile, strings.NewReplacer(" ", "-", ",", "").Replace(fmt.Sprintf("%s-%s-%d-%s.pprof", w.name, name, round, of)))
	}

	server, err := startChild(ctx, w.server)
	if err != nil {
		return result{}, err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	var addr string
	if err := server.ask(serverConfig{Messages: warm + count + rest, BodySize: w.bodySize, Profile: profile("server")}, &addr); err != nil {
		return result{}, err
	}
	client, err := startChild(ctx, "client")
	if err != nil {
		return result{}, err
	}
	var s spent
	err = client.ask(clientConfig{
		Library: library, Addr: addr, Topic: topic, Channel: channel, MaxInFlight: w.maxInFlight, Handlers: handlers,
		WarmUp: warm, Count: count, Rest: rest, TLS: w.tls, Snappy: w.snappy, Deflate: w.deflate, Heap: o.heap, Profile: profile("client"),
	}, &s)
	// The server has the last word, and knows more if both have something to say.
	if stopErr := client.stop(); err == nil {
		err = stopErr
	}
	var finished int
	if serverErr := server.ask(struct{}{}, &finished); serverErr != nil || err != nil {
		return result{}, errors.Join(serverErr, err)
	}
	return newResult(s, count), nil
}

// runConsume measures all workloads and prints the table.
func runConsume(ctx context.Context, o options, out io.Writer) (missed int, err error) {
	var rows []workload
	for _, w := range workloads {
		if o.wants(w.name) {
			rows = append(rows, w)
		}
	}
	if len(rows) == 0 {
		return 0, nil
	}
	if o.profile != "" {
		if err := os.MkdirAll(o.profile, 0o755); err != nil {
			return 0, err
		}
	}
	results := make([]map[string][]result, len(rows))
	for i := range results {
		results[i] = map[string][]result{}
	}
	random := o.random()
	for round := range o.runs {
		fmt.Fprintf(o.log, "bench: consume: round %d of %d\n", round+1, o.runs)
		for _, i := range random.Perm(len(rows)) {
			w := rows[i]
			names := w.names()
			for _, j := range random.Perm(len(names)) {
				r, err := runOnce(ctx, o, w, names[j], round+1)
				if err != nil {
					return 0, fmt.Errorf("%s, %s: %w", w.name, names[j], err)
				}
				results[i][names[j]] = append(results[i][names[j]], r)
			}
		}
	}
	return printConsume(out, rows, results)
}
