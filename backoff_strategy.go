package nsq

import (
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// BackoffStrategy gives the length of the pauses that a consumer makes while messages fail.
type BackoffStrategy interface {
	// Calculate returns the pause at backoff level attempt, which is 1 after the first failure. If the pause of the
	// next level would be longer than Config.MaxBackoffDuration the level does not rise. It must not block, and may be
	// called by several consumers at once if they share the strategy.
	Calculate(attempt int) time.Duration
}

// ExponentialStrategy doubles the pause with each level: Config.BackoffMultiplier × 2^attempt.
//
// Given to [Config.Set], a strategy reads the multiplier from that Config from then on; assigned to
// Config.BackoffStrategy, from the copy that each consumer makes; by itself it counts in seconds.
type ExponentialStrategy struct {
	cfg atomic.Pointer[Config] // whose multiplier to read; nil until bound, then never changed
}

// Calculate returns multiplier × 2^attempt, where an attempt below 0 counts as 0 and the longest duration there is
// replaces any longer one. It may be called by several goroutines at once.
func (s *ExponentialStrategy) Calculate(attempt int) time.Duration {
	return exponential(multiplier(s.config()), attempt)
}

// FullJitterStrategy picks the pause at random below the one of [ExponentialStrategy], so that many consumers don't come
// back at once. See <https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/>. It reads the multiplier
// from the same Config as an ExponentialStrategy would.
type FullJitterStrategy struct {
	cfg atomic.Pointer[Config] // whose multiplier to read; nil until bound, then never changed
}

// Calculate returns a random duration from 0 up to, but not including, multiplier × 2^attempt. The limits are those of
// [ExponentialStrategy.Calculate]. It may be called by several goroutines at once.
func (s *FullJitterStrategy) Calculate(attempt int) time.Duration {
	ceiling := exponential(multiplier(s.config()), attempt)
	if ceiling <= 0 {
		return 0
	}
	return rand.N(ceiling)
}

func exponential(unit time.Duration, attempt int) time.Duration {
	attempt = max(attempt, 0)
	switch {
	case unit <= 0:
		return 0
	case attempt >= 63 || unit > math.MaxInt64>>attempt:
		return math.MaxInt64
	default:
		return unit << attempt
	}
}

// multiplier falls back to the default of BackoffMultiplier for an unbound strategy.
func multiplier(c *Config) time.Duration {
	if c == nil {
		return time.Second
	}
	return c.BackoffMultiplier
}

func newExponential(c *Config) *ExponentialStrategy {
	s := &ExponentialStrategy{}
	s.cfg.Store(c)
	return s
}

func newFullJitter(c *Config) *FullJitterStrategy {
	s := &FullJitterStrategy{}
	s.cfg.Store(c)
	return s
}

// config returns the Config the strategy is bound to, or nil. It is fine to ask a nil strategy.
func (s *ExponentialStrategy) config() *Config {
	if s == nil {
		return nil
	}
	return s.cfg.Load()
}

func (s *FullJitterStrategy) config() *Config {
	if s == nil {
		return nil
	}
	return s.cfg.Load()
}

// bind makes c the Config to read from, unless the strategy has one. Atomic, because the strategy may be in use.
func (s *ExponentialStrategy) bind(c *Config) {
	if s != nil {
		s.cfg.CompareAndSwap(nil, c)
	}
}

func (s *FullJitterStrategy) bind(c *Config) {
	if s != nil {
		s.cfg.CompareAndSwap(nil, c)
	}
}

// bindStrategy is for Config.Set: it binds a built-in strategy to c and returns it, or returns another one if it is bound
// elsewhere already. A user's type that embeds a built-in one is bound likewise, but can't be replaced.
func bindStrategy(s BackoffStrategy, c *Config) BackoffStrategy {
	bindUnbound(s, c)
	switch b := s.(type) {
	case *ExponentialStrategy:
		if b.config() != c {
			return newExponential(c)
		}
	case *FullJitterStrategy:
		if b.config() != c {
			return newFullJitter(c)
		}
	}
	return s
}

// strategyFor returns the strategy to use with c for one that was assigned to a field: it may be nil, or unbound. An
// unbound one is left as it is, because the next Config it is in may have another multiplier; a bound one takes its place.
// What a user's type embeds can't be replaced, and is bound to the first Config.
func strategyFor(s BackoffStrategy, c *Config) BackoffStrategy {
	switch b := s.(type) {
	case nil:
		return newExponential(c)
	case *ExponentialStrategy:
		if b.config() == nil {
			return newExponential(c)
		}
	case *FullJitterStrategy:
		if b.config() == nil {
			return newFullJitter(c)
		}
	default:
		bindUnbound(s, c)
	}
	return s
}

// bindUnbound also finds the bind of a built-in strategy embedded in a user's type.
func bindUnbound(s BackoffStrategy, c *Config) {
	if b, ok := s.(interface{ bind(*Config) }); ok && !isNil(s) {
		b.bind(c)
	}
}
