package nsq

import (
	"runtime/debug"
	"time"
)

// backoff says when a consumer holds back after failed messages. It is a value without goroutine, clock or lock:
// rdyLoop, its one user, tells it what happened and when.
//
// The level counts the steps taken. At level 0 all is normal. Above it the consumer first waits, with RDY 0
// everywhere, and then probes: one connection gets RDY 1, and the answer to what comes decides on the next step. From
// each state the next step is scheduled: waiting ends by the time in until, probing by the answer to a probe, which
// rdyLoop moves from connection to connection until one sends something.
//
//	level 0 ──failed──▶ waiting ──until──▶ probing ──failed──▶ waiting, a level up if it may
//	                       ▲                  ├──neutral──────▶ waiting, same level
//	                       └──────────────────┴──succeeded────▶ waiting a level down, or level 0
type backoff struct {
	strategy    BackoffStrategy
	maxDuration time.Duration // 0: backoff is off

	level   int
	waiting bool
	until   time.Time // when waiting ends
	last    time.Duration

	// period counts the steps. A probe's message carries the period it arrived in; only one of the present period
	// decides, so that many messages failing together make one step.
	period uint64
}

// maxBackoffLevel bounds the way back for strategies whose pauses don't grow to Config.MaxBackoffDuration. Those of the
// exponential one do at level 31 at the latest, from a multiplier of a microsecond to an hour.
const maxBackoffLevel = 32

// containedStrategy is a user's strategy whose panics don't end the process. It makes no pause then.
type containedStrategy struct {
	BackoffStrategy
	log *loggers
}

func (s containedStrategy) Calculate(attempt int) time.Duration {
	result := make(chan time.Duration, 1)
	go func() { // of its own, for runtime.Goexit
		var d time.Duration
		returned := false
		defer func() {
			if p := recover(); p != nil {
				s.log.logf(LogLevelError, "BackoffStrategy panicked (%v)\n%s", p, debug.Stack())
			} else if !returned {
				s.log.logf(LogLevelError, "BackoffStrategy called runtime.Goexit")
			}
			result <- d
		}()
		d = s.BackoffStrategy.Calculate(attempt)
		returned = true
	}()
	return <-result
}

// enabled tells whether failures can have an effect at all.
func (b *backoff) enabled() bool { return b.maxDuration > 0 }

// active tells whether the consumer holds back at present.
func (b *backoff) active() bool { return b.level > 0 }

// probing tells whether one connection may have RDY 1.
func (b *backoff) probing() bool { return b.level > 0 && !b.waiting }

// decides tells whether the answer to a message which arrived in this period of probing (0: outside of any) counts.
func (b *backoff) decides(period uint64) bool {
	return b.level == 0 || !b.waiting && period == b.period
}

// failed is told of a message that was requeued with backoff. It reports whether a step was taken.
func (b *backoff) failed(now time.Time, period uint64) bool {
	if !b.enabled() || !b.decides(period) {
		return false
	}
	// At the ceiling the level stays, so that the way back is never longer than the way up.
	if d := b.strategy.Calculate(b.level + 1); d <= b.maxDuration && b.level < maxBackoffLevel {
		b.level++
		b.wait(now, d)
		return true
	}
	if b.level == 0 {
		return false
	}
	b.wait(now, b.strategy.Calculate(b.level))
	return true
}

// succeeded is told of a message that was finished. It reports whether a step was taken.
func (b *backoff) succeeded(now time.Time, period uint64) bool {
	if b.level == 0 || !b.decides(period) {
		return false
	}
	b.level--
	if b.level > 0 {
		b.wait(now, b.strategy.Calculate(b.level))
		return true
	}
	b.period++
	return true
}

// neutral is told of a message that was requeued without backoff. It reports whether a step was taken: a probe that
// says nothing is followed by another one, a wait later.
func (b *backoff) neutral(now time.Time, period uint64) bool {
	if b.level == 0 || !b.decides(period) {
		return false
	}
	b.wait(now, b.strategy.Calculate(b.level))
	return true
}

func (b *backoff) wait(now time.Time, d time.Duration) {
	d = min(max(d, 0), b.maxDuration)
	b.period++
	b.waiting = true
	b.last = d
	b.until = now.Add(d)
}

// tick is told the time. It reports whether waiting ended with it.
func (b *backoff) tick(now time.Time) bool {
	if b.level == 0 || !b.waiting || now.Before(b.until) {
		return false
	}
	b.waiting = false
	return true
}

// next returns when tick is due, the zero time if it is not.
func (b *backoff) next() time.Time {
	if b.level > 0 && b.waiting {
		return b.until
	}
	return time.Time{}
}
