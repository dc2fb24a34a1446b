package nsq

import (
	"context"
	"crypto/tls"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// deafTransport answers nothing before the test ends, whatever becomes of the request's context.
type deafTransport struct{ over chan struct{} }

func (d deafTransport) RoundTrip(*http.Request) (*http.Response, error) {
	<-d.over
	return nil, http.ErrServerClosed
}

// What the user hands in may ignore its context. A stop does not wait for it.
func TestStopDoesNotWaitForAnHTTPClientThatIgnoresItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		deaf := deafTransport{make(chan struct{})}
		defer close(deaf.over)
		r := newTestConsumer(t, newFakeCluster(t), nil)
		r.AddHandler(HandlerFunc(finishAll))
		r.SetLookupdHttpClient(&http.Client{Transport: deaf})
		start := time.Now()
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		require.Equal(t, firstLookupWait, time.Since(start))
		time.Sleep(10 * time.Minute)
		stopConsumer(t, r, idleStop)
	})
}

// Closing is bounded at each step, however little the peer takes of it: the goodbye of TLS does not fit into a socket
// that CLS has nearly filled.
func TestStopDoesNotWaitForTheGoodbyeOfTLS(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.tls, b.socketBuffer = true, 40 })
		r := newTestConsumer(t, n.cluster, func(cfg *Config) {
			cfg.TlsV1, cfg.TlsConfig = true, &tls.Config{RootCAs: fakeCert().pool}
		})
		r.AddHandler(HandlerFunc(finishAll))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		time.Sleep(time.Second)
		n.stopReading()
		stopConsumer(t, r, idleStop)
	})
}

// The deadline of Shutdown holds in the last step too, when nsqd has all answers and does not hang up.
func TestShutdownIsInTimeThoughNSQDDoesNotHangUp(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		r := newTestConsumer(t, n.cluster, nil)
		r.AddHandler(finishing(100 * time.Millisecond))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.set(func(b *fakeBehaviour) {
			b.afterCommand = func(_ *fakeConn, line string) {
				if line[:3] == "FIN" {
					go n.stopReading()
				}
			}
		})
		n.publish("x")
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		start := time.Now()
		_ = r.Shutdown(ctx)
		require.Equal(t, 500*time.Millisecond, time.Since(start))
	})
}

// Stop has its limit also where a Shutdown with all the time in the world came before.
func TestStopLimitsAShutdownThatHasNoLimit(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		release := make(chan struct{})
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.ShutdownTimeout = 3 * time.Second })
		r.AddHandler(HandlerFunc(func(*Message) error { <-release; return nil }))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publish("x")
		synctest.Wait()
		result := make(chan error, 1)
		var unlimited context.Context // nil is no limit
		go func() { result <- r.Shutdown(unlimited) }()
		time.Sleep(time.Minute)
		begin := time.Now()
		r.Stop()
		r.Stop()
		<-r.StopChan
		require.Equal(t, 3*time.Second, time.Since(begin))
		require.ErrorAs(t, <-result, new(*ShutdownError))
		close(release)
	})
}
