package nsq

import (
	"math"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// An int has 32 bits on 386 and arm.
func TestNumbersBeyondAnIntAreRefused(t *testing.T) {
	cfg := NewConfig()
	require.NoError(t, cfg.Set("max_in_flight", int64(math.MaxInt)))
	require.Equal(t, math.MaxInt, cfg.MaxInFlight)

	err := cfg.Set("max_in_flight", int64(1)<<40)
	if strconv.IntSize == 64 {
		require.NoError(t, err)
		return
	}
	require.ErrorAs(t, err, new(*OptionError))
	require.Equal(t, math.MaxInt, cfg.MaxInFlight)
}

// What the race detector finds depends on goroutines meeting, so all calls are made again and again while messages come
// and are answered.
func TestPublicCallsMayBeMadeFromManyGoroutines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 20 })
		handled := make(chan struct{}, 1000)
		r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
			m.Touch()
			if m.Attempts == 1 && m.ID[MsgIDLength-1] == '0' {
				m.RequeueWithoutBackoff(0)
				return nil
			}
			handled <- struct{}{}
			return nil
		}), 4)
		require.NoError(t, r.ConnectToNSQD(n.addr))

		calls := map[string]func(){
			"Stats":             func() { r.Stats() },
			"Status":            func() { r.Status() },
			"IsStarved":         func() { r.IsStarved() },
			"ChangeMaxInFlight": func() { r.ChangeMaxInFlight(20) },
			"SetLogger":         func() { r.SetLogger(nil, LogLevelWarning) },
			"SetLoggerLevel":    func() { r.SetLoggerLevel(LogLevelWarning) },
			"connect again":     func() { assert.ErrorIs(t, r.ConnectToNSQD(n.addr), ErrAlreadyConnected) },
			"connect to nobody": func() { assert.ErrorAs(t, r.ConnectToNSQD(""), new(*AddressError)) },
			"forget a stranger": func() { assert.ErrorIs(t, r.DisconnectFromNSQD("nobody:1"), ErrNotConnected) },
		}
		var wg sync.WaitGroup
		for _, call := range calls {
			for range 2 {
				wg.Go(func() {
					for range 50 {
						call()
						time.Sleep(time.Millisecond)
					}
				})
			}
		}
		for range 10 {
			n.publishN(20)
			time.Sleep(3 * time.Millisecond)
		}
		for range 200 {
			<-handled
		}
		wg.Wait()
		stopConsumer(t, r, time.Second)
		require.EqualValues(t, 200, r.Stats().MessagesFinished)
	})
}
