package e2e

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// front stands before an nsqlookupd and passes requests on to it, or answers them itself, wrongly.
type front struct {
	server *httptest.Server
	real   *httputil.ReverseProxy

	mu    sync.Mutex // guards fault
	fault http.HandlerFunc
}

func startFront(t *testing.T, lookupd *nsqtest.NSQLookupd) *front {
	t.Helper()
	f := &front{real: httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: lookupd.HTTPAddr()})}
	transport := &http.Transport{}
	f.real.Transport = transport
	f.real.ErrorLog = log.New(io.Discard, "", 0) // requests that a consumer breaks off
	f.server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.server.Close()
		transport.CloseIdleConnections()
	})
	return f
}

func (f *front) addr() string { return f.server.Listener.Addr().String() }

// set makes answers wrong; nil puts them right.
func (f *front) set(fault http.HandlerFunc) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fault = fault
}

func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	fault := f.fault
	f.mu.Unlock()
	if fault == nil {
		f.real.ServeHTTP(w, r)
		return
	}
	fault(w, r)
}

// say answers with this status and body.
func say(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// endless writes pieces until the client has had enough.
func endless(piece string, pause time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, piece); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			if pause > 0 {
				<-time.After(pause)
			}
		}
	}
}

var lookupFaults = map[string]http.HandlerFunc{
	"500":                  say(http.StatusInternalServerError, `{"message":"INTERNAL_ERROR"}`),
	"200 and no body":      say(http.StatusOK, ""),
	"garbage":              say(http.StatusOK, string(randomBytes(3000))),
	"JSON of another kind": say(http.StatusOK, `{"status":"green","nodes":[{"ip":"127.0.0.1"}]}`),
	"the body breaks off": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		_, _ = io.WriteString(w, `{"channels":[],"producers":[]`)
		panic(http.ErrAbortHandler)
	},
	"addresses that are none":     say(http.StatusOK, `{"channels":[],"producers":[{"broadcast_address":"two words","tcp_port":4150},{"broadcast_address":"a","tcp_port":0}]}`),
	"redirects without end":       func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.String(), http.StatusFound) },
	"a body without end":          endless(strings.Repeat("[", 1<<18), 0),
	"a slow body without end":     endless(" ", 10*time.Millisecond),
	"the connection is closed":    func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	"nothing, with an open line":  func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	"a header and then no answer": func(w http.ResponseWriter, r *http.Request) { w.(http.Flusher).Flush(); <-r.Context().Done() },
}

// TestLookupdAnswersNonsense for a while: no connection is lost by that, one that is lost for another reason is made again, and
// another consumer starts and stops as promptly as ever. When nsqlookupd is well again, a new nsqd is found with the next poll.
func TestLookupdAnswersNonsense(t *testing.T) {
	t.Parallel()
	const pollTimeout = 300 * time.Millisecond
	configure := func() *nsq.Config {
		cfg := newConfig(10)
		cfg.LookupdPollTimeout = pollTimeout
		cfg.VanishTimeout = 0 // three good answers without it would be the end of an nsqd
		return cfg
	}
	for name, fault := range lookupFaults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lookupd := nsqtest.StartNSQLookupd(t)
			f := startFront(t, lookupd)
			p := nsqtest.StartProxy(t, "127.0.0.1:1")
			n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{
				LookupdTCPAddresses: []string{lookupd.TCPAddr()},
				BroadcastTCPAddr:    p.Addr(),
				MsgTimeout:          time.Second,
			})
			p.SetTarget(n.TCPAddr())
			require.NoError(t, n.CreateChannel(topic, channel))
			awaitListed(t, lookupd, 1)
			l := newLedger(t)
			cfg := configure()
			c := newConsumer(t, cfg, l.handler(nil))
			lines := keepLog(t, c)
			require.NoError(t, c.ConnectToNSQLookupd(f.addr()))
			awaitConnected(t, c, p.Addr())
			stopStream := l.stream(5*time.Millisecond, n)
			l.awaitMore(20)

			f.set(fault)
			asked := time.Now()
			wrong := func() bool {
				row := c.Status().NSQLookupds[0]
				return row.Failures >= 4 || row.LastError == nil && row.LastAnswer.After(asked)
			}
			eventually(t, "polls have gone wrong", wrong)
			if err := c.Status().NSQLookupds[0].LastError; err != nil {
				var failed *nsq.LookupdError
				require.ErrorAs(t, err, &failed)
			}
			l.awaitMore(20)
			require.EqualValues(t, 1, p.Accepted(), "not one connection was lost")

			l.fault(p.Addr(), cfg.MaxInFlight+1)
			p.Cut()
			// From memory, once the poll that is to tell whether it is still there has failed.
			within(t, pollTimeout+time.Second+slack, "it is connected again", func() bool {
				return p.Accepted() == 2 && connected(c, p.Addr())
			})
			l.awaitMore(20)

			another := newConsumerOf(t, "another", configure(), l.handler(nil))
			start := time.Now()
			require.NoError(t, another.ConnectToNSQLookupd(f.addr()))
			require.Less(t, time.Since(start), pollTimeout+slack)
			start = time.Now()
			stop(t, another)
			require.Less(t, time.Since(start), slack)

			f.set(nil)
			late := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}})
			require.NoError(t, late.CreateChannel(topic, channel))
			awaitListed(t, lookupd, 2)
			within(t, pollTimeout+cfg.LookupdPollInterval+slack, "the new nsqd is connected", func() bool { return connected(c, late.TCPAddr()) })
			l.publish(late, 10)
			stopStream()
			l.awaitAll()
			awaitDrained(t, late)
			require.EqualValues(t, 2, p.Accepted())
			require.LessOrEqual(t, lines.count("ERR"), 8, "each failure whose number is a power of two")
			require.LessOrEqual(t, lines.count("WRN"), 8)
		})
	}
}
