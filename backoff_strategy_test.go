package nsq

import (
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestExponentialStrategy(t *testing.T) {
	for about, test := range map[string]struct {
		multiplier time.Duration
		attempt    int
		want       time.Duration
	}{
		"level 0":           {time.Second, 0, time.Second},
		"level 1":           {time.Second, 1, 2 * time.Second},
		"level 5":           {time.Second, 5, 32 * time.Second},
		"negative":          {time.Second, -1, time.Second},
		"most negative":     {time.Second, math.MinInt, time.Second},
		"last that fits":    {time.Second, 33, time.Second << 33},
		"first that is cut": {time.Second, 34, math.MaxInt64},
		"1ns, last":         {1, 62, 1 << 62},
		"1ns, cut":          {1, 63, math.MaxInt64},
		"64":                {time.Second, 64, math.MaxInt64},
		"largest":           {time.Second, math.MaxInt, math.MaxInt64},
		"no multiplier":     {0, 10, 0},
		"and a large level": {0, math.MaxInt, 0},
		"negative unit":     {-time.Second, 3, 0},
	} {
		t.Run(about, func(t *testing.T) {
			c := NewConfig()
			c.BackoffMultiplier = test.multiplier
			require.Equal(t, test.want, c.BackoffStrategy.Calculate(test.attempt))
		})
	}
}

func TestFullJitterStrategy(t *testing.T) {
	c := NewConfig()
	require.NoError(t, c.Set("backoff_strategy", "full_jitter"))
	s := c.BackoffStrategy
	for attempt, ceiling := range map[int]time.Duration{
		-1: time.Second, 0: time.Second, 3: 8 * time.Second, 100: math.MaxInt64, math.MaxInt: math.MaxInt64,
	} {
		var low, high bool // both halves are seen; with 200 tries luck has no say in it
		for range 200 {
			d := s.Calculate(attempt)
			require.GreaterOrEqual(t, d, time.Duration(0))
			require.Less(t, d, ceiling)
			low, high = low || d < ceiling/2, high || d > ceiling/2
		}
		require.True(t, low && high, "attempt %d", attempt)
	}

	c.BackoffMultiplier = 0
	require.Zero(t, s.Calculate(5))
	c.BackoffMultiplier = 1
	require.Zero(t, s.Calculate(0), "0 is the only duration below 1ns")
}

func TestUnboundStrategies(t *testing.T) {
	require.Equal(t, 4*time.Second, (&ExponentialStrategy{}).Calculate(2))
	require.Less(t, (&FullJitterStrategy{}).Calculate(2), 4*time.Second)
	require.Equal(t, 4*time.Second, (*ExponentialStrategy)(nil).Calculate(2))
	require.Less(t, (*FullJitterStrategy)(nil).Calculate(2), 4*time.Second)
}

// cappedStrategy is how a user extends a built-in one.
type cappedStrategy struct{ ExponentialStrategy }

func (s *cappedStrategy) Calculate(attempt int) time.Duration {
	return min(s.ExponentialStrategy.Calculate(attempt), 10*time.Second)
}

func TestStrategyBinding(t *testing.T) {
	withMultiplier := func(d time.Duration) *Config {
		c := NewConfig()
		c.BackoffMultiplier = d
		return c
	}

	t.Run("Set binds the value itself", func(t *testing.T) {
		c, s := withMultiplier(3*time.Second), &ExponentialStrategy{}
		require.NoError(t, c.Set("backoff_strategy", s))
		require.Same(t, s, c.BackoffStrategy)
		require.Equal(t, 6*time.Second, s.Calculate(1))
		require.NoError(t, c.Set("backoff_multiplier", "5s"))
		require.Equal(t, 10*time.Second, s.Calculate(1))
	})
	t.Run("one value in two configs", func(t *testing.T) {
		c, d, s := withMultiplier(3*time.Second), withMultiplier(5*time.Second), &ExponentialStrategy{}
		require.NoError(t, c.Set("backoff_strategy", s))
		require.NoError(t, d.Set("backoff_strategy", s))
		require.Equal(t, 6*time.Second, c.BackoffStrategy.Calculate(1))
		require.Equal(t, 10*time.Second, d.BackoffStrategy.Calculate(1))
	})
	t.Run("assigned", func(t *testing.T) {
		c, d, s := withMultiplier(3*time.Second), withMultiplier(5*time.Second), &ExponentialStrategy{}
		c.BackoffStrategy, d.BackoffStrategy = s, s
		require.Equal(t, 6*time.Second, c.backoffStrategy().Calculate(1))
		require.Equal(t, 6*time.Second, c.clone().BackoffStrategy.Calculate(1))
		require.Equal(t, 10*time.Second, d.clone().BackoffStrategy.Calculate(1))
	})
	t.Run("nil", func(t *testing.T) {
		for _, s := range []BackoffStrategy{nil, (*ExponentialStrategy)(nil)} {
			c := withMultiplier(3 * time.Second)
			c.BackoffStrategy = s
			require.Equal(t, 6*time.Second, c.backoffStrategy().Calculate(1))
			require.Equal(t, 6*time.Second, c.clone().BackoffStrategy.Calculate(1))
		}
	})
	t.Run("embedded in a user's type", func(t *testing.T) {
		for about, use := range map[string]func(*Config, BackoffStrategy){
			"Set":      func(c *Config, s BackoffStrategy) { require.NoError(t, c.Set("backoff_strategy", s)) },
			"assigned": func(c *Config, s BackoffStrategy) { c.BackoffStrategy = s },
		} {
			c, s := withMultiplier(3*time.Second), &cappedStrategy{}
			use(c, s)
			clone := c.clone()
			require.Same(t, s, clone.BackoffStrategy, about)
			require.Equal(t, 6*time.Second, clone.BackoffStrategy.Calculate(1), about)
			require.Equal(t, 10*time.Second, clone.BackoffStrategy.Calculate(9), about)
		}
		c := NewConfig()
		c.BackoffStrategy = (*cappedStrategy)(nil)
		require.NotPanics(t, func() { c.clone() })
	})
}

func TestStrategyShared(t *testing.T) {
	shared := []BackoffStrategy{&ExponentialStrategy{}, &FullJitterStrategy{}, &cappedStrategy{}}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			c := NewConfig()
			for _, s := range shared {
				c.BackoffStrategy = s
				c.clone().BackoffStrategy.Calculate(3)
				assert.NoError(t, c.Set("backoff_strategy", s))
				assert.GreaterOrEqual(t, c.BackoffStrategy.Calculate(3), time.Duration(0))
			}
		})
	}
	wg.Wait()
}
