package main

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestScale(t *testing.T) {
	o := scaleOptions{
		fleets:   []int{1, 12},
		compared: 12,
		runs:     1,
		idle:     20 * time.Millisecond,
		heart:    time.Second,
		turn:     10 * time.Millisecond,
		look:     20 * time.Millisecond,
		quiet:    150 * time.Millisecond,
	}
	result, err := measureScale(t.Context(), o, rand.New(rand.NewPCG(1, 1)), t.Output())
	require.NoError(t, err)
	require.Len(t, result.goNSQ, 1)
	for _, n := range o.fleets {
		require.Len(t, result.ours[n], 1)
		r := result.ours[n][0]
		require.Equal(t, n, r.nsqds)
		require.GreaterOrEqual(t, r.rdys, n)
		require.Positive(t, r.ready)
		require.Positive(t, r.bytes)
		require.GreaterOrEqual(t, r.goroutines, 2.0)
		require.Equal(t, n > turnsMaxInFlight, r.round > 0)
		require.Equal(t, n > turnsMaxInFlight && processCPU() != unknown, r.busyCPU != 0)
	}
	require.EqualValues(t, 2489, result.ours[12][0].busyRDY)
	require.Positive(t, result.ours[12][0].busy)

	var out bytes.Buffer
	_, err = printScale(&out, o, result)
	require.NoError(t, err)
	require.Contains(t, out.String(), "| connecting: RDY commands ")
	require.Contains(t, out.String(), "12 nsqds, compared with go-nsq")
}

func TestWhatIsLinear(t *testing.T) {
	tests := map[string]struct {
		costs map[int]float64
		want  string
	}{
		"the same for each":                        {map[int]float64{100: 3, 500: 3, 1000: 3}, "yes"},
		"less for each":                            {map[int]float64{100: 3, 500: 2, 1000: 1}, "yes"},
		"a little more":                            {map[int]float64{100: 3, 500: 4, 1000: 5}, "yes"},
		"each costs as much as there are":          {map[int]float64{100: 100, 500: 500, 1000: 1000}, "no"},
		"too much in the middle":                   {map[int]float64{100: 3, 500: 10, 1000: 3}, "no"},
		"small fleets don't count":                 {map[int]float64{1: 1, 10: 1, 100: 10, 500: 10, 1000: 10}, "yes"},
		"nothing to compare with":                  {map[int]float64{500: 3, 1000: 3}, "-"},
		"nothing to compare":                       {map[int]float64{1: 1, 100: 3}, "-"},
		"what can't be measured is no cause of no": {nil, "-"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.want, linear([]int{1, 10, 100, 500, 1000}, test.costs, linearSlack))
		})
	}
}

// A target that is missed is counted, for -strict.
func TestMissedTargetsOfScale(t *testing.T) {
	o := scaleOptions{fleets: []int{100, 500}, compared: 500, runs: 1}
	good := fleetRun{connectCPU: time.Millisecond, ready: time.Millisecond, bytes: 1024, goroutines: 2}
	at := func(r fleetRun, nsqds, rdys int) fleetRun {
		r.nsqds, r.rdys = nsqds, rdys
		return r
	}
	theirs := fleetRun{nsqds: 500, connectCPU: 20 * time.Millisecond, ready: time.Second, rdys: 7000, bytes: 1024, goroutines: 2}
	tests := map[string]struct {
		change func(*fleetRun)
		want   int
	}{
		"none":                            {func(*fleetRun) {}, 0},
		"memory":                          {func(r *fleetRun) { r.bytes = 21 << 10 }, 2}, // and it is not linear
		"RDY commands":                    {func(r *fleetRun) { r.rdys = 1100 }, 1},
		"CPU":                             {func(r *fleetRun) { r.connectCPU = 4 * time.Millisecond }, 1},
		"time that grows with the square": {func(r *fleetRun) { r.ready = 25 * time.Millisecond }, 1},
		"messages that cost more":         {func(r *fleetRun) { r.busyCPU = 2100 * time.Nanosecond }, 1},
		"turns that cost more for each":   {func(r *fleetRun) { r.round, r.roundCPU = time.Second, 0.9 }, 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			small, large := at(good, 100, 100), at(good, 500, 500)
			small.round, small.roundCPU, small.busyCPU = time.Second, 0.01, time.Microsecond
			large.round, large.roundCPU, large.busyCPU = time.Second, 0.01, time.Microsecond
			test.change(&large)
			var out bytes.Buffer
			missed, err := printScale(&out, o, &scaleResult{ours: map[int][]fleetRun{100: {small}, 500: {large}}, goNSQ: []fleetRun{theirs}})
			require.NoError(t, err)
			require.Equal(t, test.want, missed, out.String())
		})
	}
}
