package nsq

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Promise 14: bytes that make no sense end in a typed error and a reconnect.
func TestSenselessBytes(t *testing.T) {
	size := func(want int64) func(t *testing.T, err error) {
		return func(t *testing.T, err error) {
			var serr *FrameSizeError
			require.ErrorAs(t, err, &serr)
			require.Equal(t, want, serr.Size)
		}
	}
	frameType := func(want int32) func(t *testing.T, err error) {
		return func(t *testing.T, err error) {
			var uerr *UnexpectedFrameError
			require.ErrorAs(t, err, &uerr)
			require.Equal(t, want, uerr.Type)
		}
	}
	is := func(want error) func(t *testing.T, err error) {
		return func(t *testing.T, err error) { require.ErrorIs(t, err, want) }
	}
	for name, test := range map[string]struct {
		send  func(c *fakeConn)
		check func(t *testing.T, err error)
	}{
		"a size of -1":           {func(c *fakeConn) { c.sendSize(-1) }, size(-1)},
		"a size of 0":            {func(c *fakeConn) { c.sendSize(0) }, size(0)},
		"a size of 3":            {func(c *fakeConn) { c.sendSize(3) }, size(3)},
		"the largest size":       {func(c *fakeConn) { c.sendSize(1<<31 - 1) }, size(1<<31 - 1)},
		"over the default bound": {func(c *fakeConn) { c.sendSize(defaultMaxFrame + 1) }, size(defaultMaxFrame + 1)},
		"an unknown type":        {func(c *fakeConn) { c.sendFrame(3, []byte("x")) }, frameType(3)},
		"a negative type":        {func(c *fakeConn) { c.sendFrame(-7, nil) }, frameType(-7)},
		"a web server":           {func(c *fakeConn) { c.sendRaw(fakeHTTPAnswer) }, is(ErrHTTPResponse)},
		"a short message":        {func(c *fakeConn) { c.sendFrame(2, make([]byte, messageHeaderSize-1)) }, is(ErrShortMessage)},
		"an empty message frame": {func(c *fakeConn) { c.sendFrame(2, nil) }, is(ErrShortMessage)},
		"the end within a frame": {(*fakeConn).closeMidFrame, is(io.ErrUnexpectedEOF)},
		"the end":                {(*fakeConn).close, is(io.EOF)},
		"the end of one side":    {(*fakeConn).closeWrite, is(io.EOF)},
		"a fatal error":          {func(c *fakeConn) { c.sendError("E_BAD_TOPIC for a reason") }, func(t *testing.T, err error) { require.Equal(t, &ProtocolError{"E_BAD_TOPIC", "for a reason"}, err) }},
		"an error without words": {func(c *fakeConn) { c.sendError("") }, func(t *testing.T, err error) { require.Equal(t, &ProtocolError{}, err) }},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				d := &connEvents{}
				subscribedConn(t, n, d, 5, nil)
				n.publishN(1)
				synctest.Wait()
				test.send(n.conn())
				synctest.Wait()
				test.check(t, d.ioError(t))
				require.Zero(t, n.cluster.openConns())
				d.message(t, 0).Finish() // no panic, no effect
			})
		})
		t.Run(name+" for a consumer", func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r := consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), nil)
				first := n.conn()
				test.send(first)
				synctest.Wait()
				time.Sleep(time.Second)
				second := n.waitSubscribed()
				require.NotSame(t, first, second)
				require.Equal(t, 1, n.cluster.openConns())
				n.publishN(3)
				synctest.Wait()
				require.Equal(t, 3, n.stats().Finished)
				require.Equal(t, NodeConnected, r.Status().NSQDs[0].State)
			})
		})
	}
}

// What shares a read with nonsense is nobody's: the connection is about to end, and answers would not reach nsqd.
func TestMessagesBesideNonsenseAreNotHandled(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		d := &connEvents{}
		subscribedConn(t, n, d, 5, nil)
		n.conn().sendRaw(append(fakeFrame(FrameTypeMessage, messageFrame(1, []byte("1"))), "\xff\xff\xff\xff"...))
		synctest.Wait()
		require.Equal(t, []string{"response OK", "IO error", "close"}, d.all())
	})
}

func TestUnexpectedResponsesAreHarmless(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), nil)
		c := n.conn()
		for _, text := range []string{"OK", "CLOSE_WAIT", "", "{}", "HELLO\x00", "CLOSE_WAIT"} {
			c.sendResponse(text)
		}
		n.publishN(1)
		synctest.Wait()
		require.Equal(t, 1, n.stats().Finished)
		require.Same(t, c, n.conn())
	})
}

// Large frames are read apart from small ones. Whatever comes together, all of it arrives whole and in its order.
func TestFramesOfAllSizesArriveTogether(t *testing.T) {
	for name, segment := range map[string]int{"as much as there is": segmentGlue, "a frame at a time": 0, "in odd pieces": 1009} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.segment = segment })
				d := &connEvents{}
				subscribedConn(t, n, d, 100, nil)
				c := n.conn()
				want := d.all()
				const refused = "E_FIN_FAILED "
				for i, size := range []int{
					0, 1, largeFrame - messageHeaderSize - 1, largeFrame - messageHeaderSize, largeFrame - messageHeaderSize + 1,
					17 << 10, 17 << 10, largeFrame - 1, largeFrame, largeFrame + 1, 0, maxBatchBodies, 60000, maxText - frameTypeLength, 100 << 10, 10,
				} {
					text := strings.Repeat(string(rune('a'+i)), size)
					c.sendMessage(fmt.Sprintf("%016x", i+1), 1, []byte(text))
					want = append(want, "message "+text)
					if size > len(refused) && size <= maxText-frameTypeLength {
						c.sendResponse(text)
						c.sendHeartbeat()
						c.sendError(refused + text[len(refused):])
						want = append(want, "response "+text, "heartbeat", "error "+refused+text[len(refused):])
					}
				}
				synctest.Wait()
				got := d.all()
				require.Equal(t, len(want), len(got))
				for i := range want {
					require.True(t, want[i] == got[i], "%d: %.40s of %d bytes in place of %.40s of %d", i, got[i], len(got[i]), want[i], len(want[i]))
				}
			})
		})
	}
}

// A flood beyond RDY ends in a typed error; up to twice RDY is what nsqd may send after timeouts.
func TestFloodBeyondRDY(t *testing.T) {
	for name, test := range map[string]struct {
		rdy, sent int
		closed    bool
	}{
		"twice RDY is legal":      {rdy: 600, sent: 1200},
		"a small RDY has room":    {rdy: 1, sent: 4 + 1024},
		"one more than that":      {rdy: 1, sent: 4 + 1024 + 1, closed: true},
		"far more than RDY":       {rdy: 10, sent: 1500, closed: true},
		"at RDY 0":                {rdy: 0, sent: 1024},
		"one more than that at 0": {rdy: 0, sent: 1025, closed: true},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				d := &connEvents{}
				subscribedConn(t, n, d, test.rdy, nil)
				n.publishN(test.sent)
				n.set(func(b *fakeBehaviour) { b.overRDY = test.sent - test.rdy })
				synctest.Wait()
				if !test.closed {
					require.Equal(t, 1, n.cluster.openConns())
					require.Equal(t, test.sent, n.stats().InFlight)
					return
				}
				var terr *TooManyUnansweredError
				require.ErrorAs(t, d.ioError(t), &terr)
				require.EqualValues(t, test.rdy, terr.MaxRDY)
				require.Greater(t, terr.Unanswered, int64(4*test.rdy+1024))
			})
		})
	}
}

// The bound goes by the highest RDY: after a lower one nsqd's messages are still legal.
func TestFloodBoundGoesByTheHighestRDY(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		release := make(chan struct{})
		defer close(release)
		r := consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { <-release; return nil }), func(cfg *Config) { cfg.MaxInFlight = 1500 })
		n.publishN(1500)
		synctest.Wait()
		r.ChangeMaxInFlight(0)
		synctest.Wait()
		n.set(func(b *fakeBehaviour) { b.overRDY = 1300 + 1500 })
		n.publishN(1300)
		synctest.Wait()
		require.Equal(t, 2800, n.stats().InFlight)
		require.Equal(t, 1, n.cluster.openConns())
		require.Len(t, n.dialTimes(), 1)
	})
}

// Reading never waits for handlers: with all of them stuck and more messages than any channel holds, heartbeats are
// answered, also when nsqd sends all again because they timed out.
func TestReadingNeverWaitsForHandlers(t *testing.T) {
	t.Parallel()
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.maxRDY = 5000 })
		release := make(chan struct{})
		letGo := sync.OnceFunc(func() { close(release) })
		defer letGo()
		var runs atomic.Int32
		handler := HandlerFunc(func(*Message) error {
			runs.Add(1)
			<-release
			return nil
		})
		r := consumeFrom(t, n, 2, handler, func(cfg *Config) {
			cfg.MaxInFlight = 1500
			cfg.HeartbeatInterval = 10 * time.Second
			cfg.MaxAttempts = 0
		})
		n.publishN(1500)
		time.Sleep(6*time.Minute + time.Second)
		synctest.Wait()
		require.Len(t, n.cluster.snapshot(byLine("NOP")), 36, "a NOP for each heartbeat")
		require.Len(t, n.dialTimes(), 1)
		require.EqualValues(t, 2, runs.Load())
		status := r.Status()
		require.Equal(t, 1500, status.InFlight, "what timed out does not count any more")
		require.EqualValues(t, 6*1500, status.MessagesExpired)
		// At most twice what was left at the last purge, and that are two deliveries of each while they time out.
		require.LessOrEqual(t, r.inbox.queued, 4*1500+maxBatch, "what timed out does not pile up")

		letGo()
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 1500 })
		synctest.Wait()
		require.Zero(t, n.stats().Failed)
		require.Zero(t, r.Status().InFlight)
	})
}

func TestHeartbeatsAreAnsweredAtOnce(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), func(cfg *Config) { cfg.HeartbeatInterval = time.Second })
		time.Sleep(10*time.Second + time.Millisecond)
		beats := n.cluster.snapshot(byLine("_heartbeat_"))
		nops := n.cluster.snapshot(byLine("NOP"))
		require.Len(t, beats, 10)
		require.Len(t, nops, 10)
		for i := range nops {
			require.Equal(t, beats[i].At, nops[i].At)
		}
	})
}

// Writing is coalesced: what gathers while one write lasts goes out in the next one.
func TestWritesAreCoalesced(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 }) // a write lasts until it was read
		const messages = 1000
		gate := make(chan struct{})
		r := consumeFrom(t, n, messages, HandlerFunc(func(*Message) error { <-gate; return nil }), func(cfg *Config) { cfg.MaxInFlight = messages })
		n.publishN(messages)
		synctest.Wait()
		require.Equal(t, messages, r.Status().Running)
		n.stopReading()
		before := n.conn().clientWrites()
		close(gate)
		synctest.Wait()
		require.Zero(t, r.Status().Running, "answering does not wait for the network")
		n.startReading()
		synctest.Wait()
		require.Equal(t, messages, n.stats().Finished)
		require.LessOrEqual(t, n.conn().clientWrites()-before, 2)
	})
}

// No timer delays a command.
func TestAnswersGoOutAtOnce(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		held := make(heldMessages, 10)
		consumeFrom(t, n, 1, held, nil)
		for _, answer := range []func(m *Message){
			(*Message).Finish, func(m *Message) { m.Requeue(0) }, (*Message).Finish, func(m *Message) { m.Touch(); m.Finish() },
		} {
			n.publishN(1)
			m := held.next(t)
			time.Sleep(12345 * time.Nanosecond)
			answer(m)
			synctest.Wait()
			last := n.cluster.snapshot(byKind(entryCommand))
			require.Equal(t, time.Now(), last[len(last)-1].At)
		}
		require.Len(t, answersTo(n), 5)
	})
}

// Promise 12: how soon silence is noticed. Counted from the last byte.
func TestDeadPeerIsNoticed(t *testing.T) {
	for name, test := range map[string]struct{ heartbeat, read, want time.Duration }{
		"by the defaults":                      {30 * time.Second, 60 * time.Second, 60 * time.Second},
		"after two heartbeats":                 {5 * time.Second, 60 * time.Second, 10 * time.Second},
		"after the read timeout":               {30 * time.Second, 55 * time.Second, 55 * time.Second},
		"not before one and a half heartbeats": {30 * time.Second, 30 * time.Second, 45 * time.Second},
		"without a read timeout":               {10 * time.Second, 0, 20 * time.Second},
	} {
		for layer, secure := range map[string]bool{"in clear": false, "through TLS and snappy": true} {
			t.Run(name+" "+layer, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					var log syncedLines
					n.set(func(b *fakeBehaviour) { b.tls, b.snappy = secure, secure })
					r := consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), func(cfg *Config) {
						cfg.HeartbeatInterval, cfg.ReadTimeout = test.heartbeat, test.read
						cfg.TlsV1, cfg.Snappy = secure, secure
						cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
					})
					r.SetLogger(&log, LogLevelWarning)
					time.Sleep(test.heartbeat + time.Second) // the last byte comes a second before silence
					n.set(func(b *fakeBehaviour) { b.silent = true })
					last := time.Now().Add(-time.Second)
					closed := n.cluster.waitEntry(byKind(entryClosed))
					require.Equal(t, test.want, closed.At.Sub(last))
					synctest.Wait()
					require.Contains(t, log.text(), ErrHeartbeatTimeout.Error())
					time.Sleep(time.Second)
					dials := n.dialTimes()
					require.Len(t, dials, 2, "reconnecting starts within a second")
					n.set(func(b *fakeBehaviour) { b.silent = false })
					n.publishN(1)
					n.cluster.waitUntil(func() bool { return n.stats().Finished == 1 })
				})
			})
		}
	}
}

// Promise 12: a heartbeat that is late by nearly half an interval costs nothing, whatever the read timeout is.
func TestLateHeartbeatsCostNothing(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.noHeartbeats = true })
		consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), func(cfg *Config) {
			cfg.HeartbeatInterval, cfg.ReadTimeout = 30*time.Second, 30*time.Second
		})
		for range 20 {
			time.Sleep(45*time.Second - time.Millisecond)
			n.conn().sendHeartbeat()
			synctest.Wait()
		}
		require.Len(t, n.dialTimes(), 1)
		require.Len(t, n.cluster.snapshot(byLine("NOP")), 20)
	})
}

// Promise 12: a trickle is life.
func TestTrickleIsLife(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.noHeartbeats = true })
		held := make(heldMessages, 1)
		consumeFrom(t, n, 1, held, func(cfg *Config) { cfg.HeartbeatInterval = 10 * time.Second })
		data := append(binary.BigEndian.AppendUint16(make([]byte, 8), 1), "00000000000000aadrop by drop"...)
		for _, b := range fakeFrame(2, data) {
			time.Sleep(19 * time.Second) // of the 20 that are accepted
			n.conn().sendRaw([]byte{b})
		}
		require.Equal(t, "drop by drop", string(held.next(t).Body))
		require.Len(t, n.dialTimes(), 1)
	})
}

// Promise 12: a peer that doesn't read for a while costs nothing.
func TestPauseOfReadingCostsNothing(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		r := consumeFrom(t, n, 5, HandlerFunc(func(*Message) error { time.Sleep(time.Second); return nil }), nil)
		n.publishN(10)
		synctest.Wait()
		n.stopReadingFor(3 * time.Second)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Equal(t, 10, n.stats().Finished)
		require.Len(t, n.dialTimes(), 1)
		require.Zero(t, r.Status().LateAnswers)
	})
}

// Promise 12: one that never reads again is given up after the write timeout. Nobody who answers waits for it.
func TestWriteTimeout(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		var log syncedLines
		var running sync.WaitGroup
		running.Add(10)
		gate := make(chan struct{})
		r := consumeFrom(t, n, 10, HandlerFunc(func(m *Message) error {
			if m.Attempts == 1 {
				running.Done()
				<-gate
			}
			return nil
		}), func(cfg *Config) { cfg.WriteTimeout = 7 * time.Second })
		r.SetLogger(&log, LogLevelWarning)
		n.publishN(10)
		running.Wait()
		n.stopReading()
		begin := time.Now()
		close(gate)
		synctest.Wait()
		require.Zero(t, r.Status().Running)
		require.Equal(t, begin, time.Now())
		time.Sleep(7*time.Second - time.Nanosecond)
		synctest.Wait()
		require.Equal(t, NodeConnected, r.Status().NSQDs[0].State)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.NotEqual(t, NodeConnected, r.Status().NSQDs[0].State)
		time.Sleep(time.Second)
		require.Contains(t, log.text(), "timeout")

		n.startReading()
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 10 })
		require.Len(t, n.dialTimes(), 2)
	})
}

func TestNoWriteTimeout(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), func(cfg *Config) { cfg.WriteTimeout = 0 })
		n.stopReading()
		n.publishN(1)
		time.Sleep(50 * time.Second)
		n.startReading()
		synctest.Wait()
		require.Equal(t, 1, n.stats().Finished)
		require.Len(t, n.dialTimes(), 1)
	})
}

// A handler never waits on a connection that has trouble, whatever it calls.
func TestAnsweringNeverBlocks(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		held := make(heldMessages, 100)
		consumeFrom(t, n, 10, held, func(cfg *Config) {
			cfg.MaxInFlight = 100
			cfg.MaxBackoffDuration = time.Minute
		})
		n.publishN(100)
		synctest.Wait()
		n.stopReading()
		begin := time.Now()
		var answering sync.WaitGroup
		for i := range 100 {
			m := held.next(t)
			answering.Go(func() {
				m.Touch()
				if i%2 == 0 {
					m.Finish()
				} else {
					m.Requeue(0)
				}
			})
		}
		answering.Wait()
		synctest.Wait()
		n.dropAll()
		synctest.Wait()
		require.Equal(t, begin, time.Now())
		n.startReading()
	})
}

// Promise 13, at the end of a connection's life: the message that ends it is in the log once, with its cause.
func TestLostConnectionIsLoggedWithItsCause(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var log syncedLines
		r := consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), nil)
		r.SetLogger(&log, LogLevelWarning)
		n.conn().sendSize(-1)
		n.cluster.waitEntry(byKind(entryClosed))
		synctest.Wait()
		require.Contains(t, log.text(), "IO error - nsq: negative frame size -1")
	})
}

// Through TLS a deadline that passed for good would leave the layer unusable; the socket below hides those that don't.
func TestDeadlinesBelowTLSAreHidden(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.tls = true })
		consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), func(cfg *Config) {
			cfg.TlsV1, cfg.TlsConfig = true, &tls.Config{RootCAs: fakeCert().pool}
			cfg.HeartbeatInterval, cfg.ReadTimeout = 4*time.Second, 8*time.Second
		})
		for range 50 {
			time.Sleep(1500 * time.Millisecond)
			n.publishN(1)
		}
		synctest.Wait()
		require.Equal(t, 50, n.stats().Finished)
		require.Len(t, n.dialTimes(), 1)
	})
}
