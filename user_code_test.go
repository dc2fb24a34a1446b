package nsq

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

type panickingStrategy struct{}

func (panickingStrategy) Calculate(int) time.Duration { panic("no idea") }

type panickingError struct{ text *string }

func (e panickingError) Error() string { return *e.text }

type panickingTransport struct{}

func (panickingTransport) RoundTrip(*http.Request) (*http.Response, error) { panic("no network") }

// comesOutOfBackoff handles a message that fails once.
func comesOutOfBackoff(t *testing.T, n *fakeNSQD, strategy BackoffStrategy) {
	r := newTestConsumer(t, n.cluster, func(cfg *Config) {
		cfg.BackoffStrategy = strategy
		cfg.DefaultRequeueDelay = 0
	})
	r.AddHandler(HandlerFunc(func(m *Message) error {
		if m.Attempts == 1 {
			return errors.New("not yet")
		}
		return nil
	}))
	require.NoError(t, r.ConnectToNSQD(n.addr))
	id := n.publishN(1)[0]
	n.cluster.waitUntil(func() bool { return n.isFinished(id) })
	stopConsumer(t, r, time.Second)
}

// Promise 18: what the user hands in may panic, the process lives, and goes on.
func TestUserCodeThatPanics(t *testing.T) {
	t.Run("BackoffStrategy", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) { comesOutOfBackoff(t, n, panickingStrategy{}) })
	})
	t.Run("Dial", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newTestConsumer(t, newFakeCluster(t), func(cfg *Config) {
				cfg.Dial = func(context.Context, string, string) (net.Conn, error) { panic("no proxy") }
			})
			r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
			require.ErrorContains(t, r.ConnectToNSQD("nsqd-1:4150"), "no proxy")
			stopConsumer(t, r, time.Second)
		})
	})
	t.Run("the error of a handler", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			var log syncedLines
			r := consumeFrom(t, n, 1, HandlerFunc(func(m *Message) error {
				if m.Attempts == 1 {
					return panickingError{}
				}
				return nil
			}), nil)
			r.SetLogger(&log, LogLevelError)
			id := n.publishN(1)[0]
			synctest.Wait()
			require.Equal(t, []string{"REQ " + id + " 0", "FIN " + id}, answersTo(n))
			require.Contains(t, log.text(), "for msg "+id)
		})
	})
	t.Run("a logger", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			var lines atomic.Int32
			r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.BackoffMultiplier, cfg.DefaultRequeueDelay = time.Millisecond, 0 })
			r.AddHandler(HandlerFunc(byBodyOnce))
			r.SetLogger(funcLogger(func(int, string) error {
				lines.Add(1)
				panic("Log in goroutine after the test has completed")
			}), LogLevelDebug)
			stderr := captureStderr(t)
			require.NoError(t, r.ConnectToNSQD(n.addr))
			n.publish("good", "bad", "panic")
			n.cluster.waitUntil(func() bool { return n.stats().Finished == 3 })
			n.dropAll()
			n.waitSubscribed()
			stopConsumer(t, r, time.Second)
			require.Contains(t, stderr(), "nsq: the logger panicked: Log in goroutine after the test has completed\n")
			require.Greater(t, lines.Load(), int32(20), "of all goroutines")
		})
	})
	t.Run("RoundTripper", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newTestConsumer(t, newFakeCluster(t), nil)
			r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
			r.SetLookupdHttpClient(&http.Client{Transport: panickingTransport{}})
			require.NoError(t, r.ConnectToNSQLookupd("lookupd:4161"))
			require.ErrorContains(t, r.Status().NSQLookupds[0].LastError, "no network")
			stopConsumer(t, r, time.Second)
		})
	})
}

// byBodyOnce does what the body says at the first attempt.
func byBodyOnce(m *Message) error {
	if m.Attempts == 1 && string(m.Body) == "panic" {
		panic("boom")
	}
	if m.Attempts == 1 {
		return byBody(m)
	}
	return nil
}

// captureStderr takes what is written to standard error from now on, and returns a function that gives it back and what
// came meanwhile.
func captureStderr(t *testing.T) (text func() string) {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	require.NoError(t, err)
	before := os.Stderr
	os.Stderr = file
	t.Cleanup(func() { os.Stderr = before; _ = file.Close() })
	return func() string {
		os.Stderr = before
		data, err := os.ReadFile(file.Name())
		require.NoError(t, err)
		return string(data)
	}
}

// A connect that succeeded is no error, whatever becomes of the connection a moment later: it will be made again.
func TestConnectThatIsLostAtOnceHasSucceeded(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) {
			b.afterCommand = func(c *fakeConn, line string) {
				if line == "SUB t c" {
					c.close()
				}
			}
		})
		r := newTestConsumer(t, n.cluster, nil)
		r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
		for range 20 {
			require.NoError(t, r.ConnectToNSQD(n.addr))
			require.NoError(t, r.DisconnectFromNSQD(n.addr))
		}
		stopConsumer(t, r, time.Second)
	})
}

// A Conn that is being closed takes no more messages, and closes although one is never answered.
func TestConnClosesInTheMiddleOfAStream(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.msgTimeout = 5 * time.Second })
		cfg := NewConfig()
		cfg.Dial = n.cluster.Dial
		c := NewConn(n.addr, cfg, nil)
		c.SetLogger(nil, LogLevelError, "")
		_, err := c.Connect()
		require.NoError(t, err)
		require.NoError(t, c.WriteCommand(Subscribe("t", "c")))
		require.NoError(t, c.WriteCommand(Ready(2)))
		n.publishN(10)
		synctest.Wait()
		require.NoError(t, c.Close())
		require.NoError(t, c.Close())
		synctest.Wait()
		require.Equal(t, []string{"IDENTIFY", "SUB t c", "RDY 2", "RDY 0"}, n.commands())
		time.Sleep(6 * time.Second)
		synctest.Wait()
		require.Zero(t, n.cluster.openConns())
	})
}

type exitingStrategy struct{}

func (exitingStrategy) Calculate(int) time.Duration {
	runtime.Goexit()
	return 0
}

type exitingTransport struct{}

func (exitingTransport) RoundTrip(*http.Request) (*http.Response, error) {
	runtime.Goexit()
	return nil, nil
}

// As t.FailNow and require do when a test has gone wrong.
func TestUserCodeThatEndsItsGoroutine(t *testing.T) {
	t.Run("BackoffStrategy", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) { comesOutOfBackoff(t, n, exitingStrategy{}) })
	})
	t.Run("http.Client", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			r := newTestConsumer(t, n.cluster, nil)
			u, err := parseLookupdAddress("l1:4161")
			require.NoError(t, err)
			_, err = r.query(t.Context(), &http.Client{Transport: exitingTransport{}}, u, "")
			require.ErrorContains(t, err, "ended its goroutine", "and not a good answer that lists nobody")
			stopConsumer(t, r, time.Second)
		})
	})
	t.Run("VerifyConnection", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			n.set(func(b *fakeBehaviour) { b.tls = true })
			r := newTestConsumer(t, n.cluster, func(cfg *Config) {
				cfg.TlsV1 = true
				cfg.TlsConfig = &tls.Config{
					InsecureSkipVerify: true,
					VerifyConnection: func(tls.ConnectionState) error {
						runtime.Goexit()
						return nil
					},
				}
			})
			r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
			require.ErrorContains(t, r.ConnectToNSQD(n.addr), "ended its goroutine")
			synctest.Wait()
			require.Zero(t, n.cluster.openConns())
			require.Len(t, n.dialTimes(), 1)
			stopConsumer(t, r, time.Second)
		})
	})
}

// brokenConn panics at one of its methods.
type brokenConn struct {
	net.Conn
	method string
}

func (c brokenConn) broken(method string) {
	if method == c.method {
		panic("broken " + method)
	}
}

func (c brokenConn) Read(p []byte) (int, error)  { c.broken("Read"); return c.Conn.Read(p) }
func (c brokenConn) Write(p []byte) (int, error) { c.broken("Write"); return c.Conn.Write(p) }
func (c brokenConn) Close() error                { _ = c.Conn.Close(); c.broken("Close"); return nil }

func TestConnectionOfTheUserThatPanics(t *testing.T) {
	for _, method := range []string{"Read", "Write", "Close"} {
		t.Run(method, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r := newTestConsumer(t, n.cluster, func(cfg *Config) {
					cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
						nc, err := n.cluster.Dial(ctx, network, addr)
						return brokenConn{nc, method}, err
					}
				})
				r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
				if err := r.ConnectToNSQD(n.addr); method == "Close" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, "broken "+method)
				}
				stopConsumer(t, r, time.Second)
			})
		})
	}
	t.Run("VerifyConnection", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			n.set(func(b *fakeBehaviour) { b.tls = true })
			r := newTestConsumer(t, n.cluster, func(cfg *Config) {
				cfg.TlsV1 = true
				cfg.TlsConfig = &tls.Config{
					InsecureSkipVerify: true,
					VerifyConnection:   func(tls.ConnectionState) error { panic("broken callback") },
				}
			})
			r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
			require.ErrorContains(t, r.ConnectToNSQD(n.addr), "broken callback")
			stopConsumer(t, r, time.Second)
		})
	})
}
