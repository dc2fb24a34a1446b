package nsq

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// layerStacks are all that a connection can be made of.
var layerStacks = map[string]struct{ tls, snappy, deflate bool }{
	"plain":           {},
	"TLS":             {tls: true},
	"snappy":          {snappy: true},
	"deflate":         {deflate: true},
	"TLS and snappy":  {tls: true, snappy: true},
	"TLS and deflate": {tls: true, deflate: true},
}

// randomBodies are bodies from one byte up to largest, half of them of noise and half of them easy to compress.
func randomBodies(rng *rand.Rand, count, largest int) []string {
	bodies := make([]string, count)
	for i := range bodies {
		body := make([]byte, 1+rng.IntN(largest))
		if i == 0 {
			body = make([]byte, largest)
		}
		for k := range body {
			body[k] = byte(rng.Uint32())
		}
		if i%2 == 1 {
			body = bytes.Repeat([]byte{byte(i)}, len(body))
		}
		bodies[i] = string(body)
	}
	return bodies
}

// Promise 15.
func TestLayersAtEverySegmentation(t *testing.T) {
	t.Parallel()
	for stack, layers := range layerStacks {
		for segments, test := range map[string]struct{ segment, count, largest int }{
			"a frame at a time":     {0, 8, 70 << 10},
			"a byte at a time":      {1, 6, fewer(2000)},
			"seven bytes at a time": {7, 8, fewer(6000)},
			"as much as there is":   {segmentGlue, 8, 70 << 10},
		} {
			t.Run(stack+" "+segments, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					n.set(func(b *fakeBehaviour) {
						b.tls, b.snappy, b.deflate = layers.tls, layers.snappy, layers.deflate
						b.segment = test.segment
						b.authSecret = "s3cret"
						// What comes next shares a segment with the answer to SUB.
						b.afterCommand = func(c *fakeConn, line string) {
							if line == "SUB t c" {
								c.sendHeartbeat()
							}
						}
					})
					var mu sync.Mutex
					got := map[string]string{}
					handler := HandlerFunc(func(m *Message) error {
						mu.Lock()
						defer mu.Unlock()
						got[string(m.ID[:])] = string(m.Body)
						return nil
					})
					r := consumeFrom(t, n, 2, handler, func(cfg *Config) {
						cfg.TlsV1, cfg.Snappy, cfg.Deflate = layers.tls, layers.snappy, layers.deflate
						cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
						cfg.AuthSecret = "s3cret"
					})
					bodies := randomBodies(rand.New(rand.NewPCG(1, 2)), test.count, test.largest)
					want := map[string]string{}
					for i, id := range n.publish(bodies...) {
						want[id] = bodies[i]
					}
					n.cluster.waitUntil(func() bool { return n.stats().Finished == test.count })
					synctest.Wait()
					require.True(t, maps.Equal(want, got), "bodies are not what was sent")
					require.Len(t, n.dialTimes(), 1)
					stopConsumer(t, r, 100*time.Millisecond)
					require.Equal(t, 1, len(n.cluster.snapshot(byLine("CLS"))))
					require.Zero(t, n.stats().InFlight)
				})
			})
		}
	}
}

// Promise 15, over real sockets: what the kernel makes of segments, and TLS with it.
func TestLayersOverTCP(t *testing.T) {
	for stack, layers := range layerStacks {
		t.Run(stack, func(t *testing.T) {
			checkNoLeaks(t)
			n := listenFake(t)
			n.set(func(b *fakeBehaviour) { b.tls, b.snappy, b.deflate = layers.tls, layers.snappy, layers.deflate })
			cfg := NewConfig()
			cfg.MaxInFlight = 10
			cfg.TlsV1, cfg.Snappy, cfg.Deflate = layers.tls, layers.snappy, layers.deflate
			cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
			r, err := NewConsumer("t", "c", cfg)
			require.NoError(t, err)
			r.SetLogger(nil, LogLevelInfo)
			var wrong sync.Map
			want := randomBodies(rand.New(rand.NewPCG(1, 2)), 20, 30<<10)
			r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
				var i int
				fmt.Sscanf(string(m.ID[:]), "%x", &i)
				if string(m.Body) != want[i-1] {
					wrong.Store(i, true)
				}
				return nil
			}), 4)
			require.NoError(t, r.ConnectToNSQD(n.addr))
			n.publish(want...)
			n.cluster.waitUntil(func() bool { return n.stats().Finished == len(want) })
			wrong.Range(func(i, _ any) bool {
				require.Fail(t, "a body is not what was sent", "%d", i)
				return false
			})
			stopConsumer(t, r, 10*time.Second)
			n.cluster.waitUntil(func() bool { return n.cluster.openConns() == 0 })
			require.Equal(t, 1, len(n.cluster.snapshot(byLine("CLS"))))
		})
	}
}

// Commands that are larger than what is written under one deadline pass all layers whole.
func TestLargeWritesPassAllLayers(t *testing.T) {
	t.Parallel()
	for stack, layers := range layerStacks {
		t.Run(stack, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.tls, b.snappy, b.deflate = layers.tls, layers.snappy, layers.deflate })
				cfg := NewConfig()
				cfg.Dial = n.cluster.Dial
				cfg.TlsV1, cfg.Snappy, cfg.Deflate = layers.tls, layers.snappy, layers.deflate
				cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
				c := NewConn(n.addr, cfg, nil)
				c.SetLogger(nil, LogLevelInfo, "")
				_, err := c.Connect()
				require.NoError(t, err)
				bodies := randomBodies(rand.New(rand.NewPCG(3, 4)), 2, 200<<10)
				for _, body := range bodies {
					require.NoError(t, c.WriteCommand(Publish("t", []byte(body))))
				}
				synctest.Wait()
				require.True(t, slices.Equal(bodies, n.publishedTo("t")), "bodies are not what was sent")
				require.NoError(t, c.Close())
				synctest.Wait()
			})
		})
	}
}

// scriptedSocket returns what it is told to, one result per Read, and keeps the deadlines that were set.
type scriptedSocket struct {
	net.Conn
	reads  []func(p []byte) (int, error)
	writes []int
	read   []time.Duration // deadlines from when they were set; 0: none
	write  []time.Duration
}

func (s *scriptedSocket) Read(p []byte) (int, error) {
	next := s.reads[0]
	s.reads = s.reads[1:]
	return next(p)
}

func (s *scriptedSocket) Write(p []byte) (int, error) {
	s.writes = append(s.writes, len(p))
	time.Sleep(time.Second)
	return len(p), nil
}

func left(t time.Time) time.Duration {
	if t.IsZero() {
		return 0
	}
	return time.Until(t)
}

func (s *scriptedSocket) SetReadDeadline(t time.Time) error {
	s.read = append(s.read, left(t))
	return nil
}

func (s *scriptedSocket) SetWriteDeadline(t time.Time) error {
	s.write = append(s.write, left(t))
	return nil
}

func TestSocketCountsSilenceInBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bytesAfter := func(d time.Duration) func([]byte) (int, error) {
			return func([]byte) (int, error) { time.Sleep(d); return 1, nil }
		}
		deadlineAfter := func(d time.Duration) func([]byte) (int, error) {
			return func([]byte) (int, error) { time.Sleep(d); return 0, os.ErrDeadlineExceeded }
		}
		nc := &scriptedSocket{reads: []func([]byte) (int, error){
			bytesAfter(2 * time.Second),    // less than a quarter: the deadline stays
			deadlineAfter(6 * time.Second), // too early, 6 s after the last byte
			deadlineAfter(2 * time.Second), // 8 s after it
		}}
		s := &socket{Conn: nc}
		require.NoError(t, s.watchSilence(8*time.Second))
		n, err := s.Read(make([]byte, 10))
		require.NoError(t, err)
		require.Equal(t, 1, n)
		_, err = s.Read(make([]byte, 10))
		require.ErrorIs(t, err, ErrHeartbeatTimeout)
		require.Equal(t, []time.Duration{8 * time.Second, 2 * time.Second}, nc.read)
		require.Empty(t, nc.reads)

		nc.read, nc.reads = nil, []func([]byte) (int, error){deadlineAfter(0), func([]byte) (int, error) { return 0, io.EOF }}
		require.NoError(t, s.watchSilence(0))
		_, err = s.Read(nil)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		_, err = s.Read(nil)
		require.Equal(t, io.EOF, err)
		require.Equal(t, []time.Duration{0}, nc.read, "no limit")
	})
}

func TestSocketGivesEachPieceItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nc := &scriptedSocket{}
		s := &socket{Conn: nc, writeTimeout: 3 * time.Second}
		n, err := s.Write(make([]byte, 2*maxWrite+5))
		require.NoError(t, err)
		require.Equal(t, 2*maxWrite+5, n)
		require.Equal(t, []int{maxWrite, maxWrite, 5}, nc.writes)
		require.Equal(t, []time.Duration{3 * time.Second, 3 * time.Second, 3 * time.Second}, nc.write)

		nc.write = nil
		s.writeTimeout = 0
		_, err = s.Write([]byte("NOP\n"))
		require.NoError(t, err)
		require.Empty(t, nc.write)
	})
}

func TestAcceptedSilence(t *testing.T) {
	for name, test := range map[string]struct{ heartbeat, read, want time.Duration }{
		"the defaults":                            {30 * time.Second, 60 * time.Second, 60 * time.Second},
		"two heartbeats if that is less":          {10 * time.Second, 60 * time.Second, 20 * time.Second},
		"the read timeout if that is less":        {30 * time.Second, 50 * time.Second, 50 * time.Second},
		"never below one and a half heartbeats":   {30 * time.Second, 30 * time.Second, 45 * time.Second},
		"without a read timeout":                  {30 * time.Second, 0, 60 * time.Second},
		"nsqd's own interval":                     {0, 0, 60 * time.Second},
		"nsqd's own interval and a short timeout": {0, 10 * time.Second, 45 * time.Second},
		"no heartbeats, no limit":                 {-1, 60 * time.Second, 0},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.want, acceptedSilence(&Config{HeartbeatInterval: test.heartbeat, ReadTimeout: test.read}))
		})
	}
}

func TestTransportFailsToWrite(t *testing.T) {
	client, server := newFakePipe(0, "a", "b")
	defer client.Close()
	server.Close()
	tr := newTransport(client, time.Second)
	for name, add := range map[string]func() error{
		"plain":   func() error { return nil },
		"snappy":  func() error { tr.addSnappy(); return nil },
		"deflate": func() error { return tr.addDeflate(6) },
	} {
		require.NoError(t, add(), name)
		var operr *net.OpError
		require.True(t, errors.As(tr.write([]byte("NOP\n")), &operr), name)
	}
}
