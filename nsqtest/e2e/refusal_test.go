package e2e

import (
	"errors"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// code checks that an error is nsqd's, with this code.
func code(want string) func(*testing.T, error) {
	return func(t *testing.T, err error) {
		var refused *nsq.ProtocolError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, want, refused.Code)
		require.True(t, refused.Fatal())
	}
}

// identifyCode is code for a refused IDENTIFY.
func identifyCode(want string) func(*testing.T, error) {
	return func(t *testing.T, err error) {
		var failed nsq.ErrIdentify
		require.ErrorAs(t, err, &failed)
		code(want)(t, err)
	}
}

func is(want error) func(*testing.T, error) {
	return func(t *testing.T, err error) { require.ErrorIs(t, err, want) }
}

// TestRefusedConnects: ConnectToNSQD returns why, and leaves nothing at nsqd. A direct address is not tried again.
func TestRefusedConnects(t *testing.T) {
	t.Parallel()
	certs := nsqtest.TempCertificates(t)
	auth := nsqtest.StartAuthServer(t, nsqtest.Grant{Secret: "s", Topic: "another"})
	tests := map[string]struct {
		opts      nsqtest.NSQDOptions
		configure func(*nsq.Config)
		check     func(*testing.T, error)
	}{
		"no right to the topic": {
			opts:      nsqtest.NSQDOptions{AuthHTTPAddresses: []string{auth.Addr()}},
			configure: func(cfg *nsq.Config) { cfg.AuthSecret = "s" },
			check:     code("E_UNAUTHORIZED"),
		},
		"TLS is required and not asked for": {
			opts:  nsqtest.NSQDOptions{Certificates: certs, TLSRequired: true},
			check: code("E_INVALID"),
		},
		"TLS is asked for and not offered": {
			configure: func(cfg *nsq.Config) { cfg.TlsV1 = true },
			check:     is(nsq.ErrTLSRefused),
		},
		"heartbeats more often than nsqd takes": {
			configure: func(cfg *nsq.Config) { cfg.HeartbeatInterval = 10 * time.Millisecond },
			check:     identifyCode("E_BAD_BODY"),
		},
		"a message timeout beyond the maximum": {
			opts:      nsqtest.NSQDOptions{MaxMsgTimeout: time.Minute},
			configure: func(cfg *nsq.Config) { cfg.MsgTimeout = time.Hour },
			check:     identifyCode("E_BAD_BODY"),
		},
		"heartbeats off": {
			configure: func(cfg *nsq.Config) { cfg.HeartbeatInterval = -1 },
			check:     code("E_INVALID"),
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := nsqtest.StartNSQD(t, test.opts)
			p := nsqtest.StartProxy(t, n.TCPAddr())
			cfg := newConfig(1)
			if test.configure != nil {
				test.configure(cfg)
			}
			c := newConsumer(t, cfg, newLedger(t).handler(nil))
			err := c.ConnectToNSQD(p.Addr())
			require.Error(t, err)
			test.check(t, err)
			require.Equal(t, nsq.NodeFailed, nsqdStatus(c, p.Addr()).State)
			require.Equal(t, err, nsqdStatus(c, p.Addr()).LastError)
			eventually(t, "the connection is closed", func() bool { return p.Conns() == 0 })
			require.EqualValues(t, 1, p.Accepted())
		})
	}
}

func TestWrongNames(t *testing.T) {
	t.Parallel()
	_, err := nsq.NewConsumer("a topic", channel, newConfig(1))
	require.EqualError(t, err, "invalid topic name")
	_, err = nsq.NewConsumer(topic, "", newConfig(1))
	require.EqualError(t, err, "invalid channel name")
}

func TestTooManyConsumersOfAChannel(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MaxChannelConsumers: 1})
	l := newLedger(t)
	first := startConsumer(t, newConfig(1), l.handler(nil), n.TCPAddr())
	second := newConsumer(t, newConfig(1), l.handler(nil))
	code("E_SUB_FAILED")(t, second.ConnectToNSQD(n.TCPAddr()))
	stop(t, first)
	require.NoError(t, second.ConnectToNSQD(n.TCPAddr()), "another try is up to the caller")
	l.publish(n, 1)
	l.awaitAll()
}

func TestWrongPorts(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	lookupd := nsqtest.StartNSQLookupd(t)
	silent := nsqtest.StartProxy(t, n.TCPAddr())
	silent.Silent()
	closed := nsqtest.StartProxy(t, n.TCPAddr())
	require.NoError(t, closed.Close())
	tests := map[string]struct {
		addr  string
		check func(*testing.T, error)
	}{
		"HTTP port of nsqd":       {n.HTTPAddr(), is(nsq.ErrHTTPResponse)},
		"HTTP port of nsqlookupd": {lookupd.HTTPAddr(), is(nsq.ErrHTTPResponse)},
		"nobody listens":          {closed.Addr(), is(syscall.ECONNREFUSED)},
		"nobody answers": {silent.Addr(), func(t *testing.T, err error) {
			var timeout *nsq.TimeoutError
			require.ErrorAs(t, err, &timeout)
			require.Equal(t, "IDENTIFY", timeout.Step)
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := newConfig(1)
			cfg.HeartbeatInterval = heartbeatInterval
			cfg.ReadTimeout = heartbeatInterval
			c := newConsumer(t, cfg, newLedger(t).handler(nil))
			start := time.Now()
			err := c.ConnectToNSQD(test.addr)
			require.Less(t, time.Since(start), heartbeatInterval+slack)
			require.Error(t, err)
			test.check(t, err)
		})
	}
}

// TestFailedConnectIsTriedAgainAtOnce by several callers: each call returns, with the error of a connect.
func TestFailedConnectIsTriedAgainAtOnce(t *testing.T) {
	t.Parallel()
	closed := nsqtest.StartProxy(t, "127.0.0.1:1")
	require.NoError(t, closed.Close())
	c := newConsumer(t, newConfig(1), newLedger(t).handler(nil))
	const callers, connects = 4, 50
	results := make(chan error, callers*connects)
	for range callers {
		go func() {
			for n := 0; n < connects; {
				err := c.ConnectToNSQD(closed.Addr())
				if errors.Is(err, nsq.ErrAlreadyConnected) { // somebody else's connect is under way
					runtime.Gosched()
					continue
				}
				results <- err
				n++
			}
		}()
	}
	for range callers * connects {
		require.ErrorIs(t, receive(t, "the result of a connect", results), syscall.ECONNREFUSED)
	}
	require.Equal(t, nsq.NodeFailed, nsqdStatus(c, closed.Addr()).State)
}
