package nsq

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// backoffStrategyFunc is a user's strategy.
type backoffStrategyFunc func(attempt int) time.Duration

func (f backoffStrategyFunc) Calculate(attempt int) time.Duration { return f(attempt) }

// backoffDoubling is 2ⁿ seconds, as the default is.
var backoffDoubling = backoffStrategyFunc(func(n int) time.Duration { return time.Second << n })

// backoffClock is a backoff with a clock of its own.
type backoffClock struct {
	t *testing.T
	backoff
	now time.Time
}

func newBackoffClock(t *testing.T, s BackoffStrategy, most time.Duration) *backoffClock {
	return &backoffClock{t: t, backoff: backoff{strategy: s, maxDuration: most}, now: time.Unix(1e9, 0)}
}

// waits checks that the backoff waits for exactly d, then lets the time pass and checks that it probes.
func (c *backoffClock) waits(d time.Duration) {
	c.t.Helper()
	require.True(c.t, c.active())
	require.False(c.t, c.probing())
	require.Equal(c.t, d, c.next().Sub(c.now))
	if d > 0 {
		require.False(c.t, c.tick(c.next().Add(-1)), "too early")
	}
	c.now = c.next()
	require.True(c.t, c.tick(c.now))
	require.True(c.t, c.probing())
	require.Zero(c.t, c.next(), "probing ends by an answer, not by the clock")
	require.False(c.t, c.tick(c.now), "once")
}

// probeFails, probeSucceeds and probeSaysNothing answer the message that came for the present probe.
func (c *backoffClock) probeFails() {
	c.t.Helper()
	require.True(c.t, c.failed(c.now, c.period))
}

func (c *backoffClock) probeSucceeds() {
	c.t.Helper()
	require.True(c.t, c.succeeded(c.now, c.period))
}

func (c *backoffClock) probeSaysNothing() {
	c.t.Helper()
	require.True(c.t, c.neutral(c.now, c.period))
}

func TestBackoffClimbsAndComesBack(t *testing.T) {
	c := newBackoffClock(t, backoffDoubling, time.Hour)
	require.True(t, c.failed(c.now, 0))
	for level := 1; level < 10; level++ { // 1023 s or so of waiting
		require.Equal(t, level, c.level)
		c.waits(time.Second << level)
		c.probeFails()
	}
	for level := 10; level > 0; level-- {
		require.Equal(t, level, c.level)
		c.waits(time.Second << level)
		c.probeSucceeds()
	}
	require.False(t, c.active())
	require.Zero(t, c.next())
	require.Equal(t, (1022+2046)*time.Second, c.now.Sub(time.Unix(1e9, 0)))
}

func TestBackoffRisesOnlyWhileThePauseStaysWithinTheMaximum(t *testing.T) {
	c := newBackoffClock(t, backoffDoubling, 10*time.Second)
	require.True(t, c.failed(c.now, 0))
	c.waits(2 * time.Second)
	c.probeFails()
	c.waits(4 * time.Second)
	for range 1000 {
		c.probeFails()
		c.waits(8 * time.Second)
	}
	require.Equal(t, 3, c.level)

	// The way back is bounded: as many successes as there are levels.
	c.probeSucceeds()
	c.waits(4 * time.Second)
	c.probeSucceeds()
	c.waits(2 * time.Second)
	c.probeSucceeds()
	require.False(t, c.active())
}

func TestBackoffDoesNotBeginWhenTheFirstPauseIsTooLong(t *testing.T) {
	c := newBackoffClock(t, backoffDoubling, 1999*time.Millisecond)
	require.False(t, c.failed(c.now, 0))
	require.False(t, c.active())
}

func TestBackoffTakesOneStepPerPeriod(t *testing.T) {
	c := newBackoffClock(t, backoffDoubling, time.Hour)
	require.True(t, c.failed(c.now, 0))
	outdated := []uint64{0, c.period, c.period - 1} // what came before the probe, be it in earlier probes
	for _, period := range outdated {
		for range 20 {
			require.False(t, c.failed(c.now, period), "while waiting")
			require.False(t, c.succeeded(c.now, period), "while waiting")
			require.False(t, c.neutral(c.now, period), "while waiting")
		}
	}
	require.Equal(t, 1, c.level)
	c.waits(2 * time.Second)
	first := c.period
	c.probeFails()
	c.waits(4 * time.Second)
	for _, period := range []uint64{0, first} {
		require.False(t, c.failed(c.now, period), "while probing for another period")
		require.False(t, c.succeeded(c.now, period), "while probing for another period")
		require.False(t, c.neutral(c.now, period), "while probing for another period")
	}
	require.True(t, c.probing())
	require.Equal(t, 2, c.level)
}

func TestBackoffWaitsAgainAfterANeutralProbe(t *testing.T) {
	c := newBackoffClock(t, backoffDoubling, time.Hour)
	require.True(t, c.failed(c.now, 0))
	for range 5 {
		c.waits(2 * time.Second)
		c.probeSaysNothing()
		require.Equal(t, 1, c.level)
	}
	c.waits(2 * time.Second)
	c.probeSucceeds()
	require.False(t, c.active())
}

func TestBackoffAtLevelZeroKnowsOnlyFailures(t *testing.T) {
	c := newBackoffClock(t, backoffDoubling, time.Hour)
	require.False(t, c.succeeded(c.now, 0))
	require.False(t, c.neutral(c.now, 0))
	require.False(t, c.tick(c.now))
	require.Zero(t, c.period)
}

func TestBackoffOffMeansOff(t *testing.T) {
	c := newBackoffClock(t, backoffDoubling, 0)
	for range 100 {
		require.False(t, c.failed(c.now, 0))
		require.False(t, c.active())
		require.Zero(t, c.next())
	}
}

// Whatever a strategy says, the pause is never negative or longer than the maximum, and the level never stays up for
// more successes than it took failures to get there.
func TestBackoffKeepsStrategiesWithinBounds(t *testing.T) {
	cfg := NewConfig()
	cfg.BackoffMultiplier = 300 * time.Millisecond
	strategies := map[string]BackoffStrategy{
		"exponential":           newExponential(cfg),
		"full jitter":           newFullJitter(cfg),
		"constant":              backoffStrategyFunc(func(int) time.Duration { return time.Second }),
		"zero":                  backoffStrategyFunc(func(int) time.Duration { return 0 }),
		"negative":              backoffStrategyFunc(func(int) time.Duration { return -time.Hour }),
		"falling":               backoffStrategyFunc(func(n int) time.Duration { return time.Minute / time.Duration(n) }),
		"much longer at random": backoffStrategyFunc(func(int) time.Duration { return time.Duration(rand.Int64N(int64(time.Hour))) }),
	}
	const most = 90 * time.Second
	for name, s := range strategies {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 2))
			c := newBackoffClock(t, s, most)
			failures := 0
			for range 1000 {
				c.now = c.now.Add(time.Duration(random.IntN(1000)) * time.Millisecond)
				if c.active() && !c.probing() {
					require.LessOrEqual(t, c.until.Sub(c.now), most)
					require.GreaterOrEqual(t, c.last, time.Duration(0))
					c.now = c.until
					c.tick(c.now)
				}
				before := c.level
				switch random.IntN(3) {
				case 0:
					if c.failed(c.now, c.period) && c.level > before {
						failures++
					}
					require.LessOrEqual(t, c.level, before+1)
				case 1:
					c.succeeded(c.now, c.period)
					require.Equal(t, max(before-1, 0), c.level)
				case 2:
					c.neutral(c.now, c.period)
					require.Equal(t, before, c.level)
				}
				require.True(t, c.level == 0 || c.waiting, "each step above level 0 schedules the next one")
			}
			require.True(t, failures > 0)
		})
	}
}

// A strategy whose pauses stay short lets the level rise, but not without end: each level is a probe on the way back.
func TestLevelIsBoundedWhateverTheStrategy(t *testing.T) {
	b := backoff{strategy: constantStrategy(time.Millisecond), maxDuration: time.Minute}
	now := time.Unix(1, 0)
	for range 1000 {
		b.failed(now, b.period)
		now = b.until
		b.tick(now)
	}
	require.Equal(t, maxBackoffLevel, b.level)
	for probes := 0; b.active(); probes++ {
		require.LessOrEqual(t, probes, maxBackoffLevel)
		b.succeeded(now, b.period)
		now = b.until
		b.tick(now)
	}
}

type constantStrategy time.Duration

func (s constantStrategy) Calculate(int) time.Duration { return time.Duration(s) }
