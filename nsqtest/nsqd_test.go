package nsqtest

import (
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/nsq/nsqd"
	"github.com/stretchr/testify/require"
)

func TestNSQDDelivers(t *testing.T) {
	n := StartNSQD(t)
	require.NoError(t, n.Publish("events", []byte("one")))

	w := dialWire(t, n.TCPAddr())
	w.subscribe(t, "events", "archive", 1)
	id, body := w.message(t)
	require.Equal(t, "one", body)
	w.send(t, "FIN %s\n", id)

	eventually(t, "nsqd counts the FIN", func() bool {
		s, err := n.ChannelStats("events", "archive")
		return err == nil && len(s.Clients) == 1 && s.Clients[0].FinishCount == 1 && s.InFlight == 0
	})
}

func TestMultiPublish(t *testing.T) {
	n := StartNSQD(t)
	require.NoError(t, n.CreateChannel("events", "archive"))
	require.NoError(t, n.MultiPublish("events", [][]byte{[]byte("one"), []byte("two\nlines")}))

	w := dialWire(t, n.TCPAddr())
	w.subscribe(t, "events", "archive", 2)
	_, first := w.message(t)
	_, second := w.message(t)
	require.ElementsMatch(t, []string{"one", "two\nlines"}, []string{first, second})
}

func TestDeferredPublish(t *testing.T) {
	n := StartNSQD(t)
	require.NoError(t, n.CreateChannel("events", "archive"))
	require.NoError(t, n.DeferredPublish("events", time.Hour, []byte("later")))
	eventually(t, "the message is deferred", func() bool {
		s, err := n.ChannelStats("events", "archive")
		return err == nil && s.Deferred == 1 && s.Depth == 0
	})

	start := time.Now()
	require.NoError(t, n.DeferredPublish("events", 200*time.Millisecond, []byte("soon")))
	w := dialWire(t, n.TCPAddr())
	w.subscribe(t, "events", "archive", 1)
	_, body := w.message(t)
	require.Equal(t, "soon", body)
	require.GreaterOrEqual(t, time.Since(start), 200*time.Millisecond)
}

func TestChannelAdministration(t *testing.T) {
	n := StartNSQD(t)
	require.NoError(t, n.CreateChannel("events", "archive"))
	require.NoError(t, n.Publish("events", []byte("one")))
	depth := func(want int64) func() bool {
		return func() bool {
			s, err := n.ChannelStats("events", "archive")
			return err == nil && s.Depth == want
		}
	}
	eventually(t, "one message waits", depth(1))

	require.NoError(t, n.PauseChannel("events", "archive"))
	s, err := n.ChannelStats("events", "archive")
	require.NoError(t, err)
	require.True(t, s.Paused)
	require.NoError(t, n.UnpauseChannel("events", "archive"))
	s, err = n.ChannelStats("events", "archive")
	require.NoError(t, err)
	require.False(t, s.Paused)

	require.NoError(t, n.EmptyChannel("events", "archive"))
	eventually(t, "the channel is empty", depth(0))
	require.NoError(t, n.DeleteChannel("events", "archive"))
	_, err = n.ChannelStats("events", "archive")
	require.ErrorIs(t, err, ErrNotFound)
}

func TestTopicAdministration(t *testing.T) {
	n := StartNSQD(t)
	require.NoError(t, n.CreateTopic("events"))
	require.NoError(t, n.PauseTopic("events"))
	require.NoError(t, n.Publish("events", []byte("one")))
	s, err := n.TopicStats("events")
	require.NoError(t, err)
	require.True(t, s.Paused)
	require.EqualValues(t, 1, s.MessageCount)
	require.EqualValues(t, 1, s.Depth)

	require.NoError(t, n.EmptyTopic("events"))
	require.NoError(t, n.UnpauseTopic("events"))
	s, err = n.TopicStats("events")
	require.NoError(t, err)
	require.False(t, s.Paused)
	require.Zero(t, s.Depth)

	require.NoError(t, n.DeleteTopic("events"))
	_, err = n.TopicStats("events")
	require.ErrorIs(t, err, ErrNotFound)
}

func TestRefusalsAreTyped(t *testing.T) {
	n := StartNSQD(t)
	err := n.DeleteTopic("nothing")
	require.ErrorIs(t, err, ErrNotFound)

	var refused *StatusError
	require.True(t, errors.As(n.Publish("not a name", []byte("x")), &refused))
	require.Equal(t, StatusError{Path: "/pub", Status: http.StatusBadRequest, Message: "INVALID_TOPIC"}, *refused)
	require.NotErrorIs(t, refused, ErrNotFound)
}

func TestStopAndRestartKeepMessages(t *testing.T) {
	n := StartNSQD(t)
	require.NoError(t, n.CreateChannel("events", "archive"))
	require.NoError(t, n.MultiPublish("events", [][]byte{[]byte("in flight"), []byte("waiting")}))
	w := dialWire(t, n.TCPAddr())
	w.subscribe(t, "events", "archive", 1)
	w.message(t)
	tcp, http := n.TCPAddr(), n.HTTPAddr()

	require.NoError(t, n.Stop())
	require.NoError(t, n.Stop(), "a second time")
	require.Error(t, n.Publish("events", []byte("nobody is there")))
	_, err := w.frame()
	require.Error(t, err, "nsqd closes its connections")

	require.NoError(t, n.Restart())
	require.Equal(t, []string{tcp, http}, []string{n.TCPAddr(), n.HTTPAddr()})
	w = dialWire(t, tcp)
	w.subscribe(t, "events", "archive", 2)
	_, first := w.message(t)
	_, second := w.message(t)
	require.ElementsMatch(t, []string{"in flight", "waiting"}, []string{first, second})
}

func TestStopGivesUpOnSilentConnection(t *testing.T) {
	n := StartNSQD(t)
	nc, err := net.DialTimeout("tcp", n.TCPAddr(), patience)
	require.NoError(t, err)
	defer nc.Close()
	require.NoError(t, n.CreateTopic("events")) // by now, nsqd has accepted the connection
	require.ErrorIs(t, n.run.stop(100*time.Millisecond), errStopTimeout)
	require.NoError(t, nc.Close())
	require.NoError(t, n.Restart())
}

func TestRestartWhileRunning(t *testing.T) {
	n := StartNSQD(t)
	require.NoError(t, n.CreateTopic("events"))
	for range 3 {
		require.NoError(t, n.Restart())
		_, err := n.TopicStats("events")
		require.NoError(t, err)
	}
}

func TestNewNSQDRemovesItsDirectory(t *testing.T) {
	n, err := NewNSQD(NSQDOptions{})
	require.NoError(t, err)
	dir := n.opts.DataPath
	require.DirExists(t, dir)
	require.NoError(t, n.Close())
	require.NoError(t, n.Close(), "a second time")
	require.NoDirExists(t, dir)
	require.ErrorIs(t, n.Restart(), ErrClosed)
}

func TestNamedDirectoryStays(t *testing.T) {
	dir := t.TempDir()
	n, err := NewNSQD(NSQDOptions{DataPath: dir})
	require.NoError(t, err)
	require.NoError(t, n.Publish("events", []byte("one")))
	require.NoError(t, n.Close())

	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.NotEmpty(t, files)
	n = StartNSQD(t, NSQDOptions{DataPath: dir})
	s, err := n.TopicStats("events")
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Depth)
}

func TestOptionsReachNSQD(t *testing.T) {
	n := StartNSQD(t, NSQDOptions{
		MsgTimeout:          5 * time.Second,
		MaxMsgTimeout:       time.Minute,
		MaxRDYCount:         7,
		NoSnappy:            true,
		MaxMsgSize:          10,
		MaxChannelConsumers: 1,
		Tune:                func(o *nsqd.Options) { o.MaxDeflateLevel = 3 },
	})
	w := dialWire(t, n.TCPAddr())
	w.identify(t, map[string]any{"feature_negotiation": true, "snappy": true})
	answer := w.mustFrame(t)
	for _, want := range []string{
		`"msg_timeout":5000`, `"max_msg_timeout":60000`, `"max_rdy_count":7`, `"snappy":false`, `"max_deflate_level":3`,
	} {
		require.Contains(t, answer, want)
	}
	w.subscribe(t, "events", "archive", 1)

	second := dialWire(t, n.TCPAddr())
	second.send(t, "SUB events archive\n")
	require.Contains(t, second.mustFrame(t), "E_SUB_FAILED")
	require.Error(t, n.Publish("events", []byte("more than ten")))
}

func TestNothingInMemory(t *testing.T) {
	n := StartNSQD(t, NSQDOptions{MemQueueSize: -1})
	require.NoError(t, n.CreateTopic("events"))
	require.NoError(t, n.PauseTopic("events"))
	require.NoError(t, n.MultiPublish("events", [][]byte{[]byte("one"), []byte("two")}))
	s, err := n.TopicStats("events")
	require.NoError(t, err)
	require.EqualValues(t, 2, s.BackendDepth)
}

func TestTimeoutsAreFoundQuickly(t *testing.T) {
	n := StartNSQD(t, NSQDOptions{MsgTimeout: 50 * time.Millisecond})
	require.NoError(t, n.Publish("events", []byte("one")))
	w := dialWire(t, n.TCPAddr())
	w.subscribe(t, "events", "archive", 1)
	start := time.Now()
	first, _ := w.message(t)
	second, _ := w.message(t)
	require.Equal(t, first, second)
	require.Less(t, time.Since(start), 4*time.Second, "nsqd's default would be 5s for a new channel")
	eventually(t, "nsqd counts the timeout", func() bool {
		s, err := n.ChannelStats("events", "archive")
		return err == nil && s.TimeoutCount > 0
	})
}

func TestClientStats(t *testing.T) {
	n := StartNSQD(t)
	w := dialWire(t, n.TCPAddr())
	w.identify(t, map[string]any{"client_id": "c1", "hostname": "h1", "user_agent": "wire/1", "sample_rate": 42})
	require.Equal(t, "OK", w.mustFrame(t))
	w.subscribe(t, "events", "archive", 5)

	var c ClientStats
	eventually(t, "RDY has arrived", func() bool {
		s, err := n.ChannelStats("events", "archive")
		if err != nil || len(s.Clients) != 1 {
			return false
		}
		c = s.Clients[0]
		return c.RDY == 5
	})
	require.Equal(t, "c1", c.ClientID)
	require.Equal(t, "h1", c.Hostname)
	require.Equal(t, "wire/1", c.UserAgent)
	require.Equal(t, w.LocalAddr().String(), c.RemoteAddress)
	require.Equal(t, 42, c.SampleRate)
	require.Equal(t, 3, c.State)
	require.False(t, c.TLS || c.Snappy || c.Deflate)
}

func TestLogEndsWithNSQD(t *testing.T) {
	var mu sync.Mutex
	var lines []string
	n, err := NewNSQD(NSQDOptions{Logf: func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		lines = append(lines, args[0].(string))
	}})
	require.NoError(t, err)
	require.NoError(t, n.CreateTopic("events"))
	require.NoError(t, n.Close())
	require.Contains(t, strings.Join(lines, "\n"), "TOPIC(events): created") // unlocked: nothing may write any more
}

func TestManyNSQDsHaveDifferentIDs(t *testing.T) {
	ids := make(map[string]bool)
	for range 3 {
		n := StartNSQD(t)
		require.NoError(t, n.Publish("events", []byte("one")))
		w := dialWire(t, n.TCPAddr())
		w.subscribe(t, "events", "archive", 1)
		id, _ := w.message(t)
		ids[id] = true
	}
	require.Len(t, ids, 3)
}

func TestStartErrors(t *testing.T) {
	n := StartNSQD(t)
	tests := map[string]NSQDOptions{
		"port in use":         {TCPAddress: n.TCPAddr()},
		"no such directory":   {DataPath: "testdata/missing"},
		"policy without TLS":  {TLSClientAuth: "require"},
		"broken broadcast":    {BroadcastTCPAddr: "nowhere"},
		"no number for port":  {BroadcastTCPAddr: "127.0.0.1:nsqd"},
		"directory locked by": {DataPath: n.opts.DataPath},
	}
	for name, opts := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := NewNSQD(opts)
			require.Error(t, err)
		})
	}
}

func TestUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nsqd.sock")
	n := StartNSQD(t, NSQDOptions{TCPAddress: path})
	require.Equal(t, path, n.TCPAddr())
	for range 2 {
		require.NoError(t, n.Publish("events", []byte("one")))
		nc, err := net.Dial("unix", path)
		require.NoError(t, err)
		w := newWire(t, nc)
		w.send(t, "  V2")
		w.subscribe(t, "events", "archive", 1)
		id, body := w.message(t)
		require.Equal(t, "one", body)
		w.send(t, "FIN %s\n", id)
		require.NoError(t, nc.Close())
		require.NoError(t, n.Restart())
	}
}
