package nsqtest

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNothingIsLeftBehind starts one of each, uses it and closes it. Connections end a moment after Close, hence eventually. The
// nsqd inside this process doesn't know nsqlookupd, or would keep an HTTP connection to it for 90s.
func TestNothingIsLeftBehind(t *testing.T) {
	before := runtime.NumGoroutine()

	l, err := NewNSQLookupd(NSQLookupdOptions{})
	require.NoError(t, err)
	a, err := NewAuthServer(Grant{Secret: "s"})
	require.NoError(t, err)
	n, err := NewNSQD(NSQDOptions{AuthHTTPAddresses: []string{a.Addr()}})
	require.NoError(t, err)
	c, err := NewNSQDProcess(NSQDOptions{LookupdTCPAddresses: []string{l.TCPAddr()}})
	require.NoError(t, err)
	p, err := NewProxy(n.TCPAddr())
	require.NoError(t, err)

	for _, node := range []*Node{&n.Node, &c.Node} {
		require.NoError(t, node.CreateChannel("events", "archive"))
		require.NoError(t, node.Publish("events", []byte("one")))
	}
	w := dialWire(t, p.Addr())
	w.sendBody(t, "AUTH", []byte("s"))
	w.mustFrame(t)
	w.subscribe(t, "events", "archive", 1)
	w.message(t)
	require.NoError(t, n.Restart())
	require.NoError(t, c.Restart())
	require.NoError(t, l.Restart())

	for _, closeIt := range []func() error{p.Close, c.Close, n.Close, a.Close, l.Close} {
		require.NoError(t, closeIt())
	}
	eventually(t, "all goroutines have ended", func() bool { return runtime.NumGoroutine() <= before })
}
