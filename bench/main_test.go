package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain lets the test program be its own children.
func TestMain(m *testing.M) {
	if code, ok := playChild(); ok {
		os.Exit(code)
	}
	// The race detector has each process wait a second for more to report when it ends, and there are many.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func init() {
	roles["test-echo"] = func(_ context.Context, p *parent) error {
		for {
			var q string
			if err := p.receive(&q); err != nil {
				return err
			}
			if q == "" {
				return errors.New("an empty question")
			}
			if err := p.send(strings.ToUpper(q)); err != nil {
				return err
			}
		}
	}
	roles["test-deaf"] = func(ctx context.Context, _ *parent) error {
		<-ctx.Done()
		return ctx.Err()
	}
}

func TestChildAnswersQuestions(t *testing.T) {
	c, err := startChild(t.Context(), "test-echo")
	require.NoError(t, err)
	for _, q := range []string{"a", "b"} {
		var answer string
		require.NoError(t, c.ask(q, &answer))
		require.Equal(t, strings.ToUpper(q), answer)
	}
	require.NoError(t, c.stop())
}

func TestErrorOfAChildReachesItsParent(t *testing.T) {
	c, err := startChild(t.Context(), "test-echo")
	require.NoError(t, err)
	var answer string
	require.EqualError(t, c.ask("", &answer), "test-echo: an empty question")
	require.ErrorContains(t, c.stop(), "exit status 1")
}

func TestChildEndsWithItsInput(t *testing.T) {
	c, err := startChild(t.Context(), "test-deaf")
	require.NoError(t, err)
	require.NoError(t, c.stop())
}

func TestChildEndsWhenTimeIsUp(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	c, err := startChild(ctx, "test-deaf")
	require.NoError(t, err)
	cause := errors.New("time is up")
	cancel(cause)
	var answer string
	require.ErrorIs(t, c.ask("anybody there?", &answer), cause)
	require.ErrorIs(t, c.stop(), cause)
}

func TestCommandLine(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		code   int
		stdout string
		stderr string
	}{
		"an unknown flag":    {args: []string{"-fast"}, code: 2, stderr: "usage"},
		"an unknown section": {args: []string{"dreams"}, code: 2, stderr: `no section "dreams"`},
		"no run at all":      {args: []string{"-runs", "0"}, code: 2, stderr: "-runs"},
		"no such row":        {args: []string{"-only", "no such row", "consume"}, stdout: "cores"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			require.Equal(t, tc.code, run(t.Context(), tc.args, &stdout, &stderr), stderr.String())
			require.Contains(t, stdout.String(), tc.stdout)
			require.Contains(t, stderr.String(), tc.stderr)
		})
	}
}

func TestMissedTargetIsAnErrorIfAskedFor(t *testing.T) {
	saved := workloads
	defer func() { workloads = saved }()
	workloads = []workload{{name: "hopeless", server: "server-fake", maxInFlight: 10, bodySize: 10, messages: 100, messagesGo: 100, noise: true, target: target{rate: math.MaxFloat64}}}
	for flag, code := range map[string]int{"-strict=false": 0, "-strict": 1} {
		var stdout bytes.Buffer
		require.Equal(t, code, run(t.Context(), []string{"-runs", "1", flag, "consume"}, &stdout, io.Discard))
		require.Contains(t, stdout.String(), "no: msg/s")
		require.Contains(t, stdout.String(), "| noise: ours / ours again ")
	}
}

func TestProfilesAreWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	require.Equal(t, 0, run(t.Context(), []string{"-runs", "1", "-scale", "0.0001", "-only", "fake, deflate", "-profile", dir, "consume"}, io.Discard, io.Discard))
	files, err := filepath.Glob(filepath.Join(dir, "fake-deflate-*.pprof"))
	require.NoError(t, err)
	require.Len(t, files, 4) // client and server, with two libraries
	for _, file := range files {
		info, err := os.Stat(file)
		require.NoError(t, err)
		require.NotZero(t, info.Size(), file)
	}
}

func TestEveryWorkloadRuns(t *testing.T) {
	for _, w := range workloads {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			w.messages, w.messagesGo = 1000, 500 // below and above RDY, depending on the row
			if w.bodySize >= 1<<20 {
				w.messages, w.messagesGo = 20, 10
			}
			for _, name := range w.names() {
				if name == again {
					continue // once is enough here
				}
				r, err := runOnce(t.Context(), options{scale: 1}, w, name, 1)
				require.NoError(t, err, name)
				require.Positive(t, r.rate, name)
				require.NotZero(t, r.cpu, name)
			}
		})
	}
}

func TestServerThatLosesItsConsumerIsAnError(t *testing.T) {
	for _, role := range []string{"server-fake", "server-nsqd"} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			server, err := startChild(t.Context(), role)
			require.NoError(t, err)
			var addr string
			require.NoError(t, server.ask(serverConfig{Messages: 10, BodySize: 10}, &addr))
			// It takes half of what is there.
			_, err = consume(t.Context(), clientConfig{Library: floor, Addr: addr, Topic: topic, Channel: channel, MaxInFlight: 1, WarmUp: 1, Count: 3, Rest: 1})
			require.NoError(t, err)
			var finished int
			require.Error(t, server.ask(struct{}{}, &finished))
			require.Error(t, server.stop())
		})
	}
}

func TestUsageBetweenTwoMoments(t *testing.T) {
	before := usage{at: time.Unix(1, 0), cpu: time.Second, reads: 1, writes: 2, mallocs: 3, gc: 1, busy: 10}
	after := usage{at: time.Unix(3, 0), cpu: 2 * time.Second, reads: 11, writes: 22, mallocs: 33, gc: 2, busy: 14}
	require.Equal(t, spent{Wall: 2 * time.Second, CPU: time.Second, Reads: 10, Writes: 20, Mallocs: 30, GCShare: 0.25}, after.since(before))

	before.cpu, before.reads, before.writes, before.busy = unknown, unknown, unknown, 14
	after.cpu, after.reads, after.writes = unknown, unknown, unknown
	s := after.since(before)
	require.Equal(t, spent{Wall: 2 * time.Second, CPU: unknown, Reads: unknown, Writes: unknown, Mallocs: 30}, s)
	require.Equal(t, result{rate: 5, cpu: unknown, reads: unknown, writes: unknown, mallocs: 3}, newResult(s, 10))
}

func TestUsageCountsThisProcess(t *testing.T) {
	before := readUsage()
	var kept []*[100]int
	for range 1000 {
		kept = append(kept, new([100]int))
	}
	require.Len(t, kept, 1000)
	require.Greater(t, readUsage().since(before).Mallocs, int64(500)) // the last few may not be counted yet
}

func TestMeterMeasuresAfterTheWarmUp(t *testing.T) {
	m := newMeter(2, 3)
	m.all += 4
	for i := range 9 {
		require.Equal(t, i >= 2, !m.start.at.IsZero())
		require.Equal(t, i >= 5, !m.end.at.IsZero())
		m.one()
	}
	require.NoError(t, m.wait(t.Context()))
	require.False(t, m.end.at.Before(m.start.at))
}

func TestSample(t *testing.T) {
	for name, tc := range map[string]struct {
		values sample
		median float64
		text   string
	}{
		"one run":               {sample{4.321}, 4.321, "4.32x (4.32-4.32)"},
		"an odd number of runs": {sample{3, 1, 200}, 3, "3.00x (1.00-200)"},
		"an even number":        {sample{4, 1, 2, 0.25}, 1.5, "1.50x (0.250-4.00)"},
		"nothing is known":      {nil, math.NaN(), "-"},
	} {
		t.Run(name, func(t *testing.T) {
			if math.IsNaN(tc.median) {
				require.True(t, math.IsNaN(tc.values.median()))
			} else {
				require.Equal(t, tc.median, tc.values.median())
			}
			require.Equal(t, tc.text, tc.values.ratios())
		})
	}
}

func TestFigure(t *testing.T) {
	for f, want := range map[float64]string{
		0: "0", 0.00321: "0.0032", 0.25: "0.250", 1: "1.00", 9.994: "9.99", 9.996: "10.0", 99.94: "99.9", 99.96: "100", 312345.6: "312346", -1.5: "-1.50",
	} {
		require.Equal(t, want, figure(f))
	}
}

func TestTarget(t *testing.T) {
	all := target{rate: 4, cpu: 10, writes: 0.02, mallocs: 0.1}
	good := figures{rateRatio: sample{4}, cpuRatio: sample{10}, ours: columns{writes: sample{0.02}, mallocs: sample{0.1}}}
	require.Equal(t, ">= 4x msg/s, >= 10x less CPU, <= 0.02 writes, <= 0.1 allocs", all.String())
	require.Empty(t, all.missed(good))
	require.Empty(t, target{}.missed(figures{}))
	require.Equal(t, []string{"msg/s", "CPU", "writes", "allocs"}, all.missed(figures{}), "unknown is not met")
	for name, spoil := range map[string]func(*figures){
		"msg/s":  func(f *figures) { f.rateRatio = sample{3.9} },
		"CPU":    func(f *figures) { f.cpuRatio = sample{9.9} },
		"writes": func(f *figures) { f.ours.writes = sample{0.021} },
		"allocs": func(f *figures) { f.ours.mallocs = sample{0.11} },
	} {
		f := good
		spoil(&f)
		require.Equal(t, []string{name}, all.missed(f))
	}
}

func TestRatiosAreThoseOfRunsThatWereNextToEachOther(t *testing.T) {
	f := newFigures([]result{{rate: 10, cpu: 1}, {rate: 20, cpu: 4}}, []result{{rate: 5, cpu: 3}, {rate: 5, cpu: unknown}})
	require.Equal(t, sample{2, 4}, f.rateRatio)
	require.Equal(t, sample{3}, f.cpuRatio)
}

func TestTableIsAlignedMarkdown(t *testing.T) {
	table := table{title: "Speed", header: []string{"who", "µs"}}
	table.add("ours", "1")
	table.add("x", "1000")
	var b strings.Builder
	require.NoError(t, table.print(&b))
	require.Equal(t, `### Speed

| who  | µs   |
|------|------|
| ours | 1    |
| x    | 1000 |

`, b.String())
}

func TestProcField(t *testing.T) {
	n, err := procField([]byte("rchar: 7\nsyscr: 42\nsyscw: 5\n"), "syscr: ")
	require.NoError(t, err)
	require.Equal(t, int64(42), n)
	_, err = procField([]byte("rchar: 7\n"), "syscr: ")
	require.Error(t, err)
}

func TestSpentSurvivesJSON(t *testing.T) {
	s := spent{Wall: 1, CPU: unknown, Reads: 2, Writes: 3, Mallocs: 4, GCShare: 0.5}
	data, err := json.Marshal(s)
	require.NoError(t, err)
	var got spent
	require.NoError(t, json.Unmarshal(data, &got))
	require.Equal(t, s, got)
}
