package nsqtest

import (
	"errors"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/nsq/nsqd"
	"github.com/stretchr/testify/require"
)

func TestProcessDelivers(t *testing.T) {
	var lines atomic.Int64
	p := StartNSQDProcess(t, NSQDOptions{
		MaxRDYCount: 7,
		Tune:        func(o *nsqd.Options) { o.MaxDeflateLevel = 3 },
		Logf:        func(string, ...any) { lines.Add(1) },
	})
	require.NotEqual(t, os.Getpid(), p.PID())
	require.NoError(t, p.Publish("events", []byte("one")))
	w := dialWire(t, p.TCPAddr())
	w.identify(t, map[string]any{"feature_negotiation": true})
	answer := w.mustFrame(t)
	require.Contains(t, answer, `"max_rdy_count":7`)
	require.Contains(t, answer, `"max_deflate_level":3`)
	w.subscribe(t, "events", "archive", 1)
	_, body := w.message(t)
	require.Equal(t, "one", body)
	require.Positive(t, lines.Load(), "lines of the log")
}

func TestKilledProcessComesBack(t *testing.T) {
	p := StartNSQDProcess(t, NSQDOptions{MemQueueSize: -1, SyncEvery: 1})
	require.NoError(t, p.CreateChannel("events", "archive"))
	require.NoError(t, p.MultiPublish("events", [][]byte{[]byte("one"), []byte("two")}))
	eventually(t, "the messages are in the channel", func() bool {
		s, err := p.ChannelStats("events", "archive")
		return err == nil && s.BackendDepth == 2
	})
	w := dialWire(t, p.TCPAddr())
	w.subscribe(t, "events", "archive", 0)
	tcp, http, pid := p.TCPAddr(), p.HTTPAddr(), p.PID()

	require.NoError(t, p.Kill())
	require.False(t, p.Running())
	require.NoError(t, p.Kill(), "a second time")
	require.Error(t, p.Publish("events", []byte("nobody is there")))
	_, err := w.frame()
	require.Error(t, err, "the connection is gone")

	require.NoError(t, p.Restart())
	require.Equal(t, []string{tcp, http}, []string{p.TCPAddr(), p.HTTPAddr()})
	require.NotEqual(t, pid, p.PID())
	require.NoError(t, p.CreateChannel("events", "archive")) // which finds what it had; nsqd writes down later that it exists
	s, err := p.ChannelStats("events", "archive")
	require.NoError(t, err)
	require.EqualValues(t, 2, s.Depth)
}

func TestKillLosesMemory(t *testing.T) {
	p := StartNSQDProcess(t)
	require.NoError(t, p.CreateChannel("events", "archive"))
	require.NoError(t, p.Publish("events", []byte("one")))
	require.NoError(t, p.Kill())
	require.NoError(t, p.Restart())
	require.NoError(t, p.CreateChannel("events", "archive")) // nsqd may have been killed before it wrote down that it exists
	s, err := p.ChannelStats("events", "archive")
	require.NoError(t, err)
	require.Zero(t, s.Depth)
}

func TestStoppedProcessKeepsMessages(t *testing.T) {
	p := StartNSQDProcess(t)
	require.NoError(t, p.Publish("events", []byte("one")))
	require.NoError(t, p.Stop())
	require.False(t, p.Running())
	require.NoError(t, p.Stop(), "a second time")
	require.NoError(t, p.Restart())
	w := dialWire(t, p.TCPAddr())
	w.subscribe(t, "events", "archive", 1)
	_, body := w.message(t)
	require.Equal(t, "one", body)
}

func TestProcessEndsDespiteSilentConnection(t *testing.T) {
	p := StartNSQDProcess(t)
	nc, err := net.DialTimeout("tcp", p.TCPAddr(), patience)
	require.NoError(t, err)
	defer nc.Close()
	require.NoError(t, p.Publish("events", []byte("one")))
	require.NoError(t, p.Restart())
	s, err := p.TopicStats("events")
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Depth)
}

func TestFreezeAndThaw(t *testing.T) {
	p := StartNSQDProcess(t)
	if runtime.GOOS == "windows" {
		require.ErrorIs(t, p.Freeze(), errors.ErrUnsupported)
		t.Skip("Windows has no SIGSTOP")
	}
	w := dialWire(t, p.TCPAddr())
	w.identify(t, map[string]any{})
	require.Equal(t, "OK", w.mustFrame(t))

	require.NoError(t, p.Freeze())
	require.NoError(t, p.Freeze(), "a second time")
	require.True(t, p.Running())
	w.send(t, "SUB events archive\n")
	require.NoError(t, w.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
	_, err := w.frame()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, "connected, and no answer")

	require.NoError(t, p.Thaw())
	require.NoError(t, w.SetReadDeadline(time.Now().Add(patience)))
	require.Equal(t, "OK", w.mustFrame(t))

	require.NoError(t, p.Freeze())
	require.NoError(t, p.Kill(), "a frozen process can be killed")
	require.ErrorIs(t, p.Thaw(), ErrNotRunning)
}

func TestNewProcessRemovesItsDirectory(t *testing.T) {
	p, err := NewNSQDProcess(NSQDOptions{})
	require.NoError(t, err)
	dir := p.opts.DataPath
	require.DirExists(t, dir)
	require.NoError(t, p.Close())
	require.NoError(t, p.Close(), "a second time")
	require.NoDirExists(t, dir)
	require.ErrorIs(t, p.Restart(), ErrClosed)
}

func TestProcessStartErrorSaysWhy(t *testing.T) {
	_, err := NewNSQDProcess(NSQDOptions{DataPath: "testdata/missing"})
	require.ErrorContains(t, err, "testdata/missing")
}

func TestLookupdForgetsKilledProcess(t *testing.T) {
	l := StartNSQLookupd(t)
	p := StartNSQDProcess(t, NSQDOptions{LookupdTCPAddresses: []string{l.TCPAddr()}})
	require.NoError(t, p.CreateTopic("events"))
	eventually(t, "nsqd is listed", func() bool { return len(listed(t, l, "events")) == 1 })
	require.NoError(t, p.Kill())
	eventually(t, "nsqd is gone", func() bool { return len(listed(t, l, "events")) == 0 })
}

// TestOrphanEnds is two tests: run by itself, and run once more as the parent that dies.
func TestOrphanEnds(t *testing.T) {
	const env = "NSQTEST_ORPHAN_PARENT"
	if os.Getenv(env) != "" {
		p, err := NewNSQDProcess(NSQDOptions{DataPath: os.Getenv(env)})
		require.NoError(t, err)
		if runtime.GOOS != "windows" {
			require.NoError(t, p.Freeze())
		}
		require.NoError(t, os.WriteFile(os.Getenv(env)+"/addr", []byte(p.HTTPAddr()), 0o600))
		self, err := os.FindProcess(os.Getpid())
		require.NoError(t, err)
		require.NoError(t, self.Kill())
		select {}
	}

	dir := t.TempDir()
	cmd := selfCommand(t, "-test.run=^TestOrphanEnds$")
	cmd.Env = append(os.Environ(), env+"="+dir)
	require.Error(t, cmd.Run(), "the parent kills itself")
	addr, err := os.ReadFile(dir + "/addr")
	require.NoError(t, err)
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	eventually(t, "the orphan has ended", func() bool {
		_, err := client.Get("http://" + string(addr) + "/ping")
		return err != nil && !os.IsTimeout(err)
	})
}
