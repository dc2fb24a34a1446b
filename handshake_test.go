package nsq

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang/snappy"
	"github.com/stretchr/testify/require"
)

// unconnected is a consumer of n with a handler that finishes everything.
func unconnected(t *testing.T, n *fakeNSQD, tune func(cfg *Config)) *Consumer {
	t.Helper()
	r := newTestConsumer(t, n.cluster, tune)
	r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
	t.Cleanup(func() { stopConsumer(t, r, time.Minute) })
	return r
}

// handshakeSetups say what to turn on for nsqd to get to a step.
var handshakeSetups = map[string]struct {
	behave func(b *fakeBehaviour)
	tune   func(cfg *Config)
}{
	"IDENTIFY": {},
	"TLS": {
		func(b *fakeBehaviour) { b.tls = true },
		func(cfg *Config) { cfg.TlsV1, cfg.TlsConfig = true, &tls.Config{RootCAs: fakeCert().pool} },
	},
	"SNAPPY":  {func(b *fakeBehaviour) { b.snappy = true }, func(cfg *Config) { cfg.Snappy = true }},
	"DEFLATE": {func(b *fakeBehaviour) { b.deflate = true }, func(cfg *Config) { cfg.Deflate = true }},
	"AUTH":    {func(b *fakeBehaviour) { b.authSecret = "s3cret" }, func(cfg *Config) { cfg.AuthSecret = "s3cret" }},
	"SUB":     {},
}

// handshakeTest runs a connect in which nsqd misbehaves at a step, and checks that nothing stays open.
func handshakeTest(t *testing.T, at string, step fakeStep, check func(t *testing.T, err error, took time.Duration)) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		setup := handshakeSetups[at]
		if setup.behave != nil {
			n.set(setup.behave)
		}
		n.at(at, step)
		r := unconnected(t, n, func(cfg *Config) {
			cfg.ReadTimeout = 40 * time.Second
			if setup.tune != nil {
				setup.tune(cfg)
			}
		})
		start := time.Now()
		err := r.ConnectToNSQD(n.addr)
		took := time.Since(start)
		require.Error(t, err)
		check(t, err, took)
		require.NotContains(t, err.Error(), "s3cret")
		synctest.Wait()
		require.Zero(t, n.cluster.openConns(), "the socket is left open")
		status := r.Status()
		require.Equal(t, NodeFailed, status.NSQDs[0].State)
		require.Equal(t, err, status.NSQDs[0].LastError)
		time.Sleep(10 * time.Minute)
		require.Len(t, n.dialTimes(), 1, "the first connect of a direct address is not tried again")

		n.at(at, fakeStep{})
		require.NoError(t, r.ConnectToNSQD(n.addr), "the next call does")
		n.publishN(1)
		synctest.Wait()
		require.Equal(t, 1, n.stats().Finished)
	})
}

// Promise 13: a refusal is the error of the connect, with nsqd's code.
func TestHandshakeRefused(t *testing.T) {
	for at, code := range map[string]string{
		"IDENTIFY": "E_BAD_BODY", "AUTH": "E_UNAUTHORIZED", "SUB": "E_SUB_FAILED",
	} {
		t.Run(at, func(t *testing.T) {
			handshakeTest(t, at, fakeStep{err: code + " for a reason"}, func(t *testing.T, err error, took time.Duration) {
				var perr *ProtocolError
				require.ErrorAs(t, err, &perr)
				require.Equal(t, &ProtocolError{Code: code, Desc: "for a reason"}, perr)
				require.Zero(t, took)
				switch at {
				case "IDENTIFY":
					require.Equal(t, ErrIdentify{code + " for a reason"}, err)
				case "AUTH":
					require.EqualError(t, err, "Error authenticating "+code+" for a reason")
				}
			})
		})
	}
	// Within an upgrade an error frame is no part of the layer that the client expects by then.
	for _, at := range []string{"TLS", "SNAPPY", "DEFLATE"} {
		t.Run(at, func(t *testing.T) {
			handshakeTest(t, at, fakeStep{err: "E_IDENTIFY_FAILED for a reason"}, func(t *testing.T, err error, took time.Duration) {
				require.LessOrEqual(t, took, 40*time.Second)
			})
		})
	}
}

// Promise 13: an answer that doesn't come ends in a *TimeoutError that names the step, after ReadTimeout.
func TestHandshakeNeverAnswered(t *testing.T) {
	for at := range handshakeSetups {
		t.Run(at, func(t *testing.T) {
			handshakeTest(t, at, fakeStep{never: true}, func(t *testing.T, err error, took time.Duration) {
				var terr *TimeoutError
				require.ErrorAs(t, err, &terr)
				require.True(t, strings.EqualFold(at, terr.Step), terr.Step)
				require.ErrorIs(t, err, os.ErrDeadlineExceeded)
				var nerr net.Error
				require.ErrorAs(t, err, &nerr)
				require.True(t, nerr.Timeout())
				require.Equal(t, 40*time.Second, took)
			})
		})
	}
}

// isEndOfStream tells whether err says that the peer is gone, in one of the ways to learn of it.
func isEndOfStream(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.EPIPE)
}

func TestHandshakeClosed(t *testing.T) {
	for at := range handshakeSetups {
		t.Run(at, func(t *testing.T) {
			handshakeTest(t, at, fakeStep{hangUp: true}, func(t *testing.T, err error, took time.Duration) {
				require.True(t, isEndOfStream(err), err)
				require.Contains(t, strings.ToUpper(err.Error()), at)
				require.Zero(t, took)
			})
		})
		t.Run(at+" in the middle of a frame", func(t *testing.T) {
			handshakeTest(t, at, fakeStep{raw: []byte("\x00\x00"), hangUp: true}, func(t *testing.T, err error, took time.Duration) {
				require.True(t, isEndOfStream(err) || errors.Is(err, snappy.ErrCorrupt), err)
				require.Zero(t, took)
			})
		})
	}
}

// Promises 13 and 14: bytes that no nsqd sends.
func TestHandshakeGarbage(t *testing.T) {
	t.Parallel()
	frame := func(frameType int32, data string) []byte { return fakeFrame(frameType, []byte(data)) }
	isSize := func(size int64) func(error) bool {
		return func(err error) bool {
			var serr *FrameSizeError
			return errors.As(err, &serr) && serr.Size == size
		}
	}
	isFrame := func(frameType int32) func(error) bool {
		return func(err error) bool {
			var uerr *UnexpectedFrameError
			return errors.As(err, &uerr) && uerr.Type == frameType
		}
	}
	for name, test := range map[string]struct {
		raw []byte
		is  func(err error) bool
	}{
		"a web server":      {fakeHTTPAnswer, func(err error) bool { return errors.Is(err, ErrHTTPResponse) }},
		"a negative size":   {[]byte("\xff\xff\xff\xff\x00\x00\x00\x00"), isSize(-1)},
		"a size of 0":       {[]byte("\x00\x00\x00\x00"), isSize(0)},
		"a size of 3":       {[]byte("\x00\x00\x00\x03abc"), isSize(3)},
		"the largest size":  {[]byte("\x7f\xff\xff\xff\x00\x00\x00\x00"), isSize(1<<31 - 1)},
		"a message":         {frame(2, "no message"), isFrame(2)},
		"an unknown type":   {frame(7, "OK"), isFrame(7)},
		"a negative type":   {frame(-1, "OK"), isFrame(-1)},
		"an empty response": {frame(0, ""), func(err error) bool { return err != nil }},
		"an error of no words": {frame(1, ""), func(err error) bool {
			var perr *ProtocolError
			return errors.As(err, &perr)
		}},
		"other words": {frame(0, "HELLO"), func(err error) bool {
			return strings.Contains(err.Error(), "HELLO") || strings.Contains(err.Error(), "invalid character")
		}},
		"half of an object":            {frame(0, "{"), func(err error) bool { return err != nil }},
		"an object of the wrong types": {frame(0, `{"max_rdy_count":"many","identity":7}`), func(err error) bool { return err != nil }},
	} {
		for _, at := range []string{"IDENTIFY", "AUTH", "SUB"} {
			t.Run(name+" at "+at, func(t *testing.T) {
				handshakeTest(t, at, fakeStep{raw: test.raw}, func(t *testing.T, err error, took time.Duration) {
					if ierr := (ErrIdentify{}); !errors.As(err, &ierr) {
						require.True(t, test.is(err), err)
					}
					require.Zero(t, took)
				})
			})
		}
	}
	for _, at := range []string{"TLS", "SNAPPY", "DEFLATE"} {
		t.Run("noise at "+at, func(t *testing.T) {
			noise := []byte(strings.Repeat("\xff\x17\x06no such layer\x00", 20))
			handshakeTest(t, at, fakeStep{raw: noise}, func(t *testing.T, err error, took time.Duration) {
				require.LessOrEqual(t, took, 40*time.Second)
			})
		})
	}
}

// Promise 13: heartbeats are answered meanwhile, and don't extend the wait.
func TestHandshakeAnswersHeartbeats(t *testing.T) {
	for at, slow := range map[string]struct {
		delay time.Duration
		beats int
	}{
		"IDENTIFY": {3 * time.Second, 1}, // the fake reads no further while it thinks about this one
		"AUTH":     {13 * time.Second, 6},
		"SUB":      {13 * time.Second, 6},
	} {
		setup := handshakeSetups[at]
		start := func(t *testing.T, n *fakeNSQD) *Consumer {
			if setup.behave != nil {
				n.set(setup.behave)
			}
			n.set(func(b *fakeBehaviour) { b.heartbeat = 2 * time.Second }) // also before IDENTIFY
			return unconnected(t, n, func(cfg *Config) {
				cfg.HeartbeatInterval = 2 * time.Second
				cfg.ReadTimeout = 15 * time.Second
				if setup.tune != nil {
					setup.tune(cfg)
				}
			})
		}
		t.Run(at+" is slow", func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.at(at, fakeStep{delay: slow.delay})
				r := start(t, n)
				require.NoError(t, r.ConnectToNSQD(n.addr))
				synctest.Wait()
				lines := n.commands("AUTH", "SUB", "RDY")
				require.Equal(t, "IDENTIFY", lines[0])
				require.Len(t, lines, 1+slow.beats, "a NOP for each heartbeat")
			})
		})
		t.Run(at+" never comes", func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.at(at, fakeStep{never: true})
				n.set(func(b *fakeBehaviour) { b.noHeartbeats = at == "IDENTIFY" })
				r := start(t, n)
				time.AfterFunc(time.Minute, func() { n.set(func(b *fakeBehaviour) { b.noHeartbeats = true }) }) // an end in any case
				begin := time.Now()
				var terr *TimeoutError
				require.ErrorAs(t, r.ConnectToNSQD(n.addr), &terr)
				require.Equal(t, at, terr.Step)
				require.Equal(t, 15*time.Second, time.Since(begin))
			})
		})
	}
}

func TestHandshakeWithoutReadTimeoutIsBounded(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.at("SUB", fakeStep{never: true})
		r := unconnected(t, n, func(cfg *Config) { cfg.ReadTimeout = 0 })
		begin := time.Now()
		var terr *TimeoutError
		require.ErrorAs(t, r.ConnectToNSQD(n.addr), &terr)
		require.Equal(t, time.Minute, time.Since(begin))
	})
}

func TestIdentifySaysWhatTheConfigSays(t *testing.T) {
	identify := func(t *testing.T, tune func(cfg *Config)) (got map[string]any) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			n.at("IDENTIFY", fakeStep{hangUp: true})
			r := unconnected(t, n, tune)
			require.Error(t, r.ConnectToNSQD(n.addr))
			require.NoError(t, json.Unmarshal(n.cluster.waitEntry(byLine("IDENTIFY")).Body, &got))
		})
		return got
	}
	t.Run("everything set", func(t *testing.T) {
		got := identify(t, func(cfg *Config) {
			cfg.ClientID = "my id"
			cfg.Hostname = "my.host"
			cfg.UserAgent = "me/1.0"
			cfg.TlsV1 = true
			cfg.Deflate = true
			cfg.DeflateLevel = 3
			cfg.SampleRate = 42
			cfg.HeartbeatInterval = 1500 * time.Millisecond
			cfg.OutputBufferSize = 4096
			cfg.OutputBufferTimeout = 75 * time.Millisecond
			cfg.MsgTimeout = 7 * time.Second
			cfg.TopologyRegion = "north"
			cfg.TopologyZone = "n2"
			cfg.AuthSecret = "s3cret" // belongs in AUTH alone
		})
		require.Equal(t, map[string]any{
			"client_id": "my id", "short_id": "my id",
			"hostname": "my.host", "long_id": "my.host",
			"user_agent":          "me/1.0",
			"feature_negotiation": true,
			"tls_v1":              true, "snappy": false, "deflate": true, "deflate_level": 3.0,
			"sample_rate":        42.0,
			"heartbeat_interval": 1500.0,
			"output_buffer_size": 4096.0, "output_buffer_timeout": 75.0,
			"msg_timeout":     7000.0,
			"topology_region": "north", "topology_zone": "n2",
		}, got)
	})
	t.Run("everything off", func(t *testing.T) {
		got := identify(t, func(cfg *Config) {
			cfg.Snappy = true
			cfg.HeartbeatInterval = -1
			cfg.OutputBufferSize = -1
			cfg.OutputBufferTimeout = -1
		})
		require.Equal(t, []any{true, false, -1.0, -1.0, -1.0, 0.0, 0.0},
			[]any{got["snappy"], got["deflate"], got["heartbeat_interval"], got["output_buffer_size"],
				got["output_buffer_timeout"], got["msg_timeout"], got["sample_rate"]})
	})
	t.Run("defaults", func(t *testing.T) {
		got := identify(t, nil)
		require.Equal(t, []any{false, false, false, 30000.0, 16384.0, 250.0},
			[]any{got["tls_v1"], got["snappy"], got["deflate"], got["heartbeat_interval"], got["output_buffer_size"],
				got["output_buffer_timeout"]})
	})
}

func TestTLSRefusedFailsTheConnect(t *testing.T) {
	for name, behave := range map[string]func(b *fakeBehaviour){
		"nsqd has none":        func(*fakeBehaviour) {},
		"nsqd says nothing":    func(b *fakeBehaviour) { b.plainOK = true },
		"nsqd drops the field": func(b *fakeBehaviour) { b.editIdentify = func(m map[string]any) { delete(m, "tls_v1") } },
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.authSecret = "s3cret" })
				n.set(behave)
				r := unconnected(t, n, func(cfg *Config) { cfg.TlsV1, cfg.AuthSecret = true, "s3cret" })
				require.ErrorIs(t, r.ConnectToNSQD(n.addr), ErrTLSRefused)
				synctest.Wait()
				require.Equal(t, []string{"IDENTIFY"}, n.commands(), "nothing in clear text")
				require.Zero(t, n.cluster.openConns())
			})
		})
	}
}

func TestCompressionRefusedGoesOn(t *testing.T) {
	for name, tune := range map[string]func(cfg *Config){
		"snappy":  func(cfg *Config) { cfg.Snappy = true },
		"deflate": func(cfg *Config) { cfg.Deflate = true },
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var log syncedLines
				r := unconnected(t, n, tune)
				r.SetLogger(&log, LogLevelWarning)
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(1)
				synctest.Wait()
				require.Equal(t, 1, n.stats().Finished)
				require.Contains(t, log.text(), "WRN")
				require.Contains(t, log.text(), "compression")
			})
		})
	}
}

func TestTLSServerName(t *testing.T) {
	for name, test := range map[string]struct {
		set      string // by the user
		want     string // what nsqd is asked for
		refused  bool
		insecure bool
	}{
		"the host of the address":          {want: "nsqd-1"},
		"the user's, if there is one":      {set: "nsqd-5", want: "nsqd-5"},
		"one that the certificate has not": {set: "example.org", want: "example.org", refused: true},
		"one that nobody looks at":         {set: "example.org", want: "example.org", insecure: true},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				asked := make(chan string, 1)
				n.set(func(b *fakeBehaviour) {
					b.tls = true
					b.tlsConfig = &tls.Config{GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
						asked <- hello.ServerName
						pair := fakeCert().pair
						return &pair, nil
					}}
				})
				mine := &tls.Config{RootCAs: fakeCert().pool, ServerName: test.set, InsecureSkipVerify: test.insecure}
				r := unconnected(t, n, func(cfg *Config) { cfg.TlsV1, cfg.TlsConfig = true, mine })
				err := r.ConnectToNSQD(n.addr)
				require.Equal(t, test.want, <-asked)
				require.Equal(t, test.set, mine.ServerName, "the user's config is the user's")
				if !test.refused {
					require.NoError(t, err)
					return
				}
				var herr x509.HostnameError
				require.ErrorAs(t, err, &herr)
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
			})
		})
	}
}

func TestTLSVerifiesByDefault(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.tls = true })
		r := unconnected(t, n, func(cfg *Config) { cfg.TlsV1 = true })
		var aerr x509.UnknownAuthorityError
		require.ErrorAs(t, r.ConnectToNSQD(n.addr), &aerr)
	})
}

func TestAuth(t *testing.T) {
	for name, test := range map[string]struct {
		secret string
		want   string // of the error; empty: accepted
	}{
		"accepted": {secret: "s3cret"},
		"missing":  {want: "Auth Required"},
		"wrong":    {secret: "other", want: "Error authenticating E_UNAUTHORIZED AUTH no authorizations found"},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.authSecret = "s3cret" })
				r := unconnected(t, n, func(cfg *Config) { cfg.AuthSecret = test.secret })
				err := r.ConnectToNSQD(n.addr)
				if test.want == "" {
					require.NoError(t, err)
					synctest.Wait()
					require.Equal(t, []string{"IDENTIFY", "AUTH", "SUB t c", "RDY 1"}, n.commands())
					return
				}
				require.EqualError(t, err, test.want)
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
				require.NotContains(t, n.commands(), "SUB t c")
			})
		})
	}
	t.Run("not asked for", func(t *testing.T) {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			r := unconnected(t, n, func(cfg *Config) { cfg.AuthSecret = "s3cret" })
			require.NoError(t, r.ConnectToNSQD(n.addr))
			require.NotContains(t, n.commands(), "AUTH", "nsqd would hang up")
		})
	})
}

// A dial that misbehaves.
func TestDialThatMisbehaves(t *testing.T) {
	boom := errors.New("boom")
	for name, test := range map[string]struct {
		dial func(n *fakeNSQD) func(ctx context.Context, network, addr string) (net.Conn, error)
		took time.Duration
		is   error
	}{
		"returns nothing": {
			dial: func(*fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(context.Context, string, string) (net.Conn, error) { return nil, nil }
			},
		},
		"fails": {
			dial: func(*fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(context.Context, string, string) (net.Conn, error) { return nil, boom }
			},
			is: boom,
		},
		"returns a nil pointer with an error, as tls.Dial does": {
			dial: func(*fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(context.Context, string, string) (net.Conn, error) { return (*tls.Conn)(nil), boom }
			},
			is: boom,
		},
		"returns a nil pointer": {
			dial: func(*fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(context.Context, string, string) (net.Conn, error) { return (*net.TCPConn)(nil), nil }
			},
		},
		"returns a nil pointer late": {
			dial: func(*fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(context.Context, string, string) (net.Conn, error) {
					time.Sleep(time.Minute)
					return (*net.UnixConn)(nil), boom
				}
			},
			took: time.Second, is: context.DeadlineExceeded,
		},
		"ends its goroutine": {
			dial: func(*fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(context.Context, string, string) (net.Conn, error) {
					runtime.Goexit()
					return nil, nil
				}
			},
		},
		"ignores its context and fails late": {
			dial: func(*fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(context.Context, string, string) (net.Conn, error) {
					time.Sleep(time.Minute)
					return nil, boom
				}
			},
			took: time.Second, is: context.DeadlineExceeded,
		},
		"ignores its context and succeeds late": {
			dial: func(n *fakeNSQD) func(context.Context, string, string) (net.Conn, error) {
				return func(_ context.Context, network, addr string) (net.Conn, error) {
					time.Sleep(time.Minute)
					return n.cluster.Dial(context.Background(), network, addr)
				}
			},
			took: time.Second, is: context.DeadlineExceeded,
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r := unconnected(t, n, func(cfg *Config) { cfg.Dial = test.dial(n) })
				begin := time.Now()
				err := r.ConnectToNSQD(n.addr)
				require.Error(t, err)
				require.Equal(t, test.took, time.Since(begin))
				if test.is != nil {
					require.ErrorIs(t, err, test.is)
				}
				stopConsumer(t, r, 100*time.Millisecond)
				time.Sleep(time.Minute) // what comes late has come, and nsqd has no reason yet to hang up
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
			})
		})
	}
}

func TestDialTimeout(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.setReach(reachHangs)
		r := unconnected(t, n, func(cfg *Config) { cfg.DialTimeout = 3 * time.Second })
		begin := time.Now()
		require.ErrorIs(t, r.ConnectToNSQD(n.addr), context.DeadlineExceeded)
		require.Equal(t, 3*time.Second, time.Since(begin))
	})
}

func TestSilentPeerIsGivenUpInTheHandshake(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.setReach(reachSilent)
		r := unconnected(t, n, func(cfg *Config) { cfg.ReadTimeout = 30 * time.Second })
		begin := time.Now()
		var terr *TimeoutError
		require.ErrorAs(t, r.ConnectToNSQD(n.addr), &terr)
		require.Equal(t, "IDENTIFY", terr.Step)
		require.Equal(t, 30*time.Second, time.Since(begin))
	})
}

func TestOldNSQDWithoutNegotiation(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.plainOK, b.maxRDY = true, 2500 })
		r := consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { return nil }), func(cfg *Config) { cfg.MaxInFlight = 5000 })
		n.publishN(10)
		synctest.Wait()
		require.Equal(t, []string{"IDENTIFY", "SUB t c", "RDY 2500"}, n.commands("FIN"))
		require.Equal(t, 10, n.stats().Finished)
		require.EqualValues(t, 2500, r.Status().NSQDs[0].MaxRDY)
	})
}
