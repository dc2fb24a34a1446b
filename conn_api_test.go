package nsq

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// connEvents is a delegate that writes down what it is told.
type connEvents struct {
	mu       sync.Mutex // guards the fields below
	events   []string
	ioErrors []error
	messages []*Message
}

func (d *connEvents) add(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events = append(d.events, fmt.Sprintf(format, args...))
}

func (d *connEvents) OnResponse(_ *Conn, data []byte) { d.add("response %s", data) }
func (d *connEvents) OnError(_ *Conn, data []byte)    { d.add("error %s", data) }
func (d *connEvents) OnMessage(_ *Conn, m *Message) {
	d.add("message %s", m.Body)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.messages = append(d.messages, m)
}
func (d *connEvents) OnMessageFinished(_ *Conn, m *Message) { d.add("finished %s", m.Body) }
func (d *connEvents) OnMessageRequeued(_ *Conn, m *Message) { d.add("requeued %s", m.Body) }
func (d *connEvents) OnBackoff(*Conn)                       { d.add("backoff") }
func (d *connEvents) OnContinue(*Conn)                      { d.add("continue") }
func (d *connEvents) OnResume(*Conn)                        { d.add("resume") }
func (d *connEvents) OnIOError(_ *Conn, err error) {
	d.add("IO error")
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ioErrors = append(d.ioErrors, err)
}
func (d *connEvents) OnHeartbeat(*Conn) { d.add("heartbeat") }
func (d *connEvents) OnClose(*Conn)     { d.add("close") }

func (d *connEvents) all() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.events)
}

// ioError returns the one error that was told.
func (d *connEvents) ioError(t *testing.T) error {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	require.Len(t, d.ioErrors, 1)
	return d.ioErrors[0]
}

func (d *connEvents) message(t *testing.T, i int) *Message {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	require.Greater(t, len(d.messages), i)
	return d.messages[i]
}

// lowLevelConn returns a silent Conn to n that is not connected yet.
func lowLevelConn(t *testing.T, n *fakeNSQD, d ConnDelegate, tune func(cfg *Config)) *Conn {
	t.Helper()
	cfg := NewConfig()
	cfg.Dial = n.cluster.Dial
	if tune != nil {
		tune(cfg)
	}
	c := NewConn(n.addr, cfg, d)
	c.SetLogger(nil, LogLevelInfo, "")
	t.Cleanup(func() {
		_ = c.Close()
		n.cluster.close() // messages may be unanswered
		synctest.Wait()
	})
	return c
}

// subscribedConn returns a Conn that has sent SUB and RDY.
func subscribedConn(t *testing.T, n *fakeNSQD, d ConnDelegate, rdy int, tune func(cfg *Config)) *Conn {
	t.Helper()
	c := lowLevelConn(t, n, d, tune)
	_, err := c.Connect()
	require.NoError(t, err)
	require.NoError(t, c.WriteCommand(Subscribe("t", "c")))
	require.NoError(t, c.WriteCommand(Ready(rdy)))
	synctest.Wait()
	return c
}

// The connection may end by a write while messages are handed on, and drops what nobody has.
func TestConnHandsOnNoDroppedMessages(t *testing.T) {
	d := &connEvents{}
	c := NewConn("nsqd-1:4150", NewConfig(), d)
	ms := arrive(2)[0]
	require.True(t, ms.messages[0].state.drop())
	ms.messages[1].Body = []byte("live")
	c.owner.received(c, ms)
	require.Equal(t, []string{"message live"}, d.all())
}

func TestConnByItself(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.maxRDY = 7 })
		d := &connEvents{}
		c := lowLevelConn(t, n, d, nil)
		created := time.Now()
		require.Equal(t, "nsqd-1:4150", c.String())
		require.Nil(t, c.RemoteAddr())
		require.EqualValues(t, 2500, c.MaxRDY())
		require.Zero(t, c.RDY())
		require.True(t, c.LastRdyTime().IsZero())
		require.False(t, c.IsClosing())
		time.Sleep(time.Second)
		require.True(t, created.Equal(c.LastMessageTime()), "until a message comes, the time of creation")

		resp, err := c.Connect()
		require.NoError(t, err)
		require.Equal(t, &IdentifyResponse{MaxRdyCount: 7, Version: "1.3.0", MsgTimeout: 60000, MaxMsgTimeout: 900000}, resp)
		require.EqualValues(t, 7, c.MaxRDY())
		require.Equal(t, "nsqd-1:4150", c.RemoteAddr().String())
		_, err = c.Connect()
		require.ErrorIs(t, err, ErrAlreadyConnected)

		require.NoError(t, c.WriteCommand(Subscribe("t", "c")))
		require.NoError(t, c.WriteCommand(Ready(2)))
		c.SetRDY(2)
		require.EqualValues(t, 2, c.RDY())
		require.EqualValues(t, 2, c.LastRDY())
		require.True(t, time.Now().Equal(c.LastRdyTime()))
		ids := n.publishN(3)
		synctest.Wait()
		require.True(t, time.Now().Equal(c.LastMessageTime()))
		first := d.message(t, 0)
		require.Equal(t, "nsqd-1:4150", first.NSQDAddress)
		first.Touch()
		first.Finish()
		first.Finish()
		synctest.Wait()
		d.message(t, 1).Requeue(0)
		synctest.Wait()
		d.message(t, 2).RequeueWithoutBackoff(time.Second)
		synctest.Wait()
		n.conn().sendHeartbeat()
		n.conn().sendError("E_FIN_FAILED FIN 00000000000000ff failed ID not in flight")
		synctest.Wait()
		d.message(t, 3).Finish() // "2" again
		synctest.Wait()
		require.NoError(t, c.WriteCommand(StartClose()))
		synctest.Wait()
		require.NoError(t, c.Close())
		synctest.Wait()

		require.Equal(t, []string{
			"IDENTIFY", "SUB t c", "RDY 2", "TOUCH " + ids[0], "FIN " + ids[0], "REQ " + ids[1] + " 0", "REQ " + ids[2] + " 1000",
			"NOP", "FIN " + ids[1], "CLS",
		}, n.commands())
		require.Equal(t, []string{
			"response OK", "message 1", "message 2", "finished 1", "resume", "message 3",
			"requeued 2", "backoff", "message 2", "requeued 3", "continue", "heartbeat",
			"error E_FIN_FAILED FIN 00000000000000ff failed ID not in flight", "finished 2", "resume",
			"response CLOSE_WAIT", "close",
		}, d.all())
		require.True(t, c.IsClosing())
		require.ErrorIs(t, c.WriteCommand(Nop()), ErrNotConnected)
		_, err = c.Write([]byte("NOP\n"))
		require.ErrorIs(t, err, ErrNotConnected)
		require.ErrorIs(t, c.Flush(), ErrNotConnected)
		_, err = c.Read(make([]byte, 1))
		require.ErrorIs(t, err, ErrNotConnected)
	})
}

func TestConnWithoutDelegate(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		c := subscribedConn(t, n, nil, 5, nil)
		n.publishN(5)
		n.conn().sendHeartbeat()
		n.conn().sendError("E_REQ_FAILED")
		synctest.Wait()
		require.Contains(t, n.commands(), "NOP")
		require.Equal(t, 5, n.stats().InFlight)
		n.conn().sendError("E_INVALID and the end")
		synctest.Wait()
		require.True(t, c.IsClosing())
		require.Zero(t, n.cluster.openConns())
	})
}

func TestConnWithPlainOK(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.plainOK = true })
		resp, err := lowLevelConn(t, n, nil, nil).Connect()
		require.NoError(t, err)
		require.Nil(t, resp)
	})
}

func TestConnWritesRaw(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		c := lowLevelConn(t, n, nil, nil)
		require.ErrorIs(t, c.WriteCommand(Nop()), ErrNotConnected)
		require.ErrorIs(t, c.Flush(), ErrNotConnected)
		_, err := c.Read(nil)
		require.ErrorIs(t, err, ErrNotConnected)
		_, err = c.Connect()
		require.NoError(t, err)
		written, err := c.Write([]byte("SUB t c\nNO"))
		require.NoError(t, err)
		require.Equal(t, 10, written)
		require.NoError(t, c.Flush())
		written, err = c.Write([]byte("P\n"))
		require.NoError(t, err)
		require.Equal(t, 2, written)
		synctest.Wait()
		require.Equal(t, []string{"IDENTIFY", "SUB t c", "NOP"}, n.commands())
	})
}

func TestConnConcurrentWrites(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		c := lowLevelConn(t, n, nil, nil)
		_, err := c.Connect()
		require.NoError(t, err)
		var wg sync.WaitGroup
		var mu sync.Mutex
		var errs []error
		for i := range 50 {
			wg.Go(func() {
				err := c.WriteCommand(Publish("t", []byte(fmt.Sprint(i))))
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			})
		}
		wg.Wait()
		synctest.Wait()
		require.NoError(t, errors.Join(errs...))
		require.Len(t, n.publishedTo("t"), 50)
	})
}

func TestConnClose(t *testing.T) {
	for name, test := range map[string]struct {
		close func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn)
		want  []string // behind SUB's answer
	}{
		"with nothing unanswered it ends at once": {
			close: func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn) { require.NoError(t, c.Close()) },
			want:  []string{"close"},
		},
		"twice": {
			close: func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn) {
				require.NoError(t, c.Close())
				require.NoError(t, c.Close())
				synctest.Wait()
				require.NoError(t, c.Close())
			},
			want: []string{"close"},
		},
		"with a message it ends behind the answer": {
			close: func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn) {
				id := n.publishN(1)[0]
				synctest.Wait()
				require.NoError(t, c.Close())
				time.Sleep(time.Minute / 2)
				synctest.Wait()
				require.True(t, c.IsClosing())
				require.Equal(t, 1, n.cluster.openConns())
				d.message(t, 0).Finish()
				synctest.Wait()
				require.True(t, n.isFinished(id))
			},
			want: []string{"message 1", "heartbeat", "finished 1", "resume", "close"},
		},
		"by nsqd": {
			close: func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn) {
				n.closeAll()
				synctest.Wait()
				require.ErrorIs(t, d.ioError(t), io.EOF)
			},
			want: []string{"IO error", "close"},
		},
		"by a reset": {
			close: func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn) {
				n.dropAll()
				synctest.Wait()
				require.ErrorIs(t, d.ioError(t), syscall.ECONNRESET)
			},
			want: []string{"IO error", "close"},
		},
		"by a fatal error": {
			close: func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn) {
				n.conn().sendError("E_INVALID for a reason")
				synctest.Wait()
				var perr *ProtocolError
				require.ErrorAs(t, d.ioError(t), &perr)
				require.Equal(t, "E_INVALID", perr.Code)
			},
			want: []string{"error E_INVALID for a reason", "IO error", "close"},
		},
		"by silence": {
			close: func(t *testing.T, n *fakeNSQD, d *connEvents, c *Conn) {
				n.set(func(b *fakeBehaviour) { b.silent = true })
				time.Sleep(time.Minute)
				synctest.Wait()
				require.ErrorIs(t, d.ioError(t), ErrHeartbeatTimeout)
			},
			want: []string{"IO error", "close"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				d := &connEvents{}
				c := subscribedConn(t, n, d, 1, nil)
				test.close(t, n, d, c)
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
				require.True(t, c.IsClosing())
				require.Equal(t, append([]string{"response OK"}, test.want...), d.all())
			})
		})
	}
}

func TestConnCloseBreaksOffConnect(t *testing.T) {
	for name, hang := range map[string]func(n *fakeNSQD){
		"in the dial":   func(n *fakeNSQD) { n.setReach(reachHangs) },
		"in IDENTIFY":   func(n *fakeNSQD) { n.at("IDENTIFY", fakeStep{never: true}) },
		"a silent peer": func(n *fakeNSQD) { n.setReach(reachSilent) },
		"in the upgrade": func(n *fakeNSQD) {
			n.set(func(b *fakeBehaviour) { b.snappy = true })
			n.at("SNAPPY", fakeStep{never: true})
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				hang(n)
				c := lowLevelConn(t, n, nil, func(cfg *Config) { cfg.Snappy, cfg.DialTimeout = true, time.Minute })
				time.AfterFunc(time.Second, func() { _ = c.Close() })
				begin := time.Now()
				_, err := c.Connect()
				require.ErrorIs(t, err, ErrClosing)
				require.Equal(t, time.Second, time.Since(begin))
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
			})
		})
	}
	t.Run("before it", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			c := lowLevelConn(t, n, nil, nil)
			require.NoError(t, c.Close())
			_, err := c.Connect()
			require.ErrorIs(t, err, ErrClosing)
			require.Empty(t, n.dialTimes())
		})
	})
}

func TestConnConnectMayBeTriedAgain(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		d := &connEvents{}
		c := lowLevelConn(t, n, d, nil)
		n.at("IDENTIFY", fakeStep{err: "E_BAD_BODY no"})
		_, err := c.Connect()
		require.Equal(t, ErrIdentify{"E_BAD_BODY no"}, err)
		synctest.Wait()
		require.Zero(t, n.cluster.openConns())
		require.Empty(t, d.all())
		n.at("IDENTIFY", fakeStep{})
		_, err = c.Connect()
		require.NoError(t, err)
	})
}

func TestConnFailedConnectLeavesNothingOpen(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.at("IDENTIFY", fakeStep{never: true})
		c := lowLevelConn(t, n, nil, func(cfg *Config) {
			cfg.HeartbeatInterval, cfg.ReadTimeout = time.Second, 2*time.Second
		})
		_, err := c.Connect()
		var terr *TimeoutError
		require.ErrorAs(t, err, &terr)
		synctest.Wait()
		require.Zero(t, n.cluster.openConns())
	})
}

func TestConnWriteThatFails(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		d := &connEvents{}
		c := subscribedConn(t, n, d, 1, func(cfg *Config) { cfg.WriteTimeout = 5 * time.Second })
		n.stopReading()
		begin := time.Now()
		err := c.WriteCommand(Nop())
		require.Equal(t, 5*time.Second, time.Since(begin))
		require.ErrorContains(t, err, "timeout")
		synctest.Wait()
		require.Equal(t, err, d.ioError(t))
		require.Equal(t, []string{"response OK", "IO error", "close"}, d.all())
	})
}

func TestConnTellsTheProgramsRDYFromAFlood(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		d := &connEvents{}
		subscribedConn(t, n, d, 2000, nil)
		n.publishN(1500)
		synctest.Wait()
		require.Equal(t, 1500, n.stats().InFlight)
		require.Equal(t, 1, n.cluster.openConns())
	})
}

func TestNewConnOnALiteralConfigPanics(t *testing.T) {
	for name, cfg := range map[string]*Config{"literal": {}, "nil": nil} {
		t.Run(name, func(t *testing.T) {
			require.PanicsWithValue(t, "Config must be created with NewConfig()", func() { NewConn("nsqd-1:4150", cfg, nil) })
		})
	}
}

func TestConnToAnAddressThatIsNone(t *testing.T) {
	for _, addr := range []string{"", "nsqd-1", "http://nsqd-1:4150", "nsqd-1:word", "nsqd 1:4150"} {
		t.Run(addr, func(t *testing.T) {
			c := NewConn(addr, NewConfig(), nil)
			c.SetLogger(nil, LogLevelInfo, "")
			_, err := c.Connect()
			var aerr *AddressError
			require.ErrorAs(t, err, &aerr)
		})
	}
}

func TestConnLogger(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		c := lowLevelConn(t, n, nil, nil)
		var all, errs syncedLines
		c.SetLogger(&all, LogLevelInfo, "<%s>")
		c.SetLoggerForLevel(&errs, LogLevelError, "")
		_, err := c.Connect()
		require.NoError(t, err)
		n.conn().sendError("E_REQ_FAILED\n\x1b[31m")
		synctest.Wait()
		require.Contains(t, all.text(), "INF  <nsqd-1:4150> connecting to nsqd")
		require.Contains(t, errs.text(), "ERR  (nsqd-1:4150) protocol error - E_REQ_FAILED")
		require.NotContains(t, errs.text(), "\x1b", "a peer's text must not drive a terminal")
		require.Equal(t, 1, len(strings.Split(errs.text(), "\n")))
	})
}
