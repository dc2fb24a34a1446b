//go:build unix

package nsq

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TCP's own probes keep flows open that a NAT would forget between two heartbeats, and find dead peers where heartbeats
// are off.
func TestKeepAliveIsOn(t *testing.T) {
	n := listenFake(t)
	r, err := NewConsumer("t", "c", NewConfig())
	require.NoError(t, err)
	r.SetLogger(nil, LogLevelInfo)
	r.AddHandler(HandlerFunc(finishAll))
	defer stopConsumer(t, r, 10*time.Second)
	require.NoError(t, r.ConnectToNSQD(n.addr))
	raw, err := r.conns()[0].transport.socket.Conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	on, getErr := 0, error(nil)
	require.NoError(t, raw.Control(func(fd uintptr) {
		on, getErr = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_KEEPALIVE)
	}))
	require.NoError(t, getErr)
	require.NotZero(t, on)
}
