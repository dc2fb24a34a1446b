package nsq

import (
	"bufio"
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang/snappy"
	"github.com/stretchr/testify/require"
)

// connMemory is the fixed amount of memory per connection that README.md and ARCHITECTURE.md promise, beside
// max-in-flight times the size of a message, whatever the peer does.
const connMemory = 4 << 20

// heapNow is what is reachable on the heap.
func heapNow() int64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// attacker is an nsqd that is up to no good, for one consumer at a time. It speaks the protocol up to SUB and RDY; then its
// attack begins, on each connection anew, and ends for good when it has sent its amount. It keeps no log: what it measures
// is the consumer's memory.
type attacker struct {
	granted  string               // answer to IDENTIFY; empty: no timeout is named
	deaf     bool                 // reads nothing any more once the attack begins
	amount   int                  // how many things to send
	send     func(a *attack) bool // sends the next thing; false: the connection is gone
	identify func(a *attack)      // in place of the answer to IDENTIFY
	auth     func(a *attack)      // in place of the answer to AUTH

	mu         sync.Mutex // held by the connection that attacks, for the fields below
	base, peak int64
	sent       int
	frames     []byte   // what send writes
	packed     [][]byte // with compression: all that is to be written, made beforehand

	done chan struct{}
}

// attack is one connection of an attacker.
type attack struct {
	*attacker
	nc net.Conn
	r  *bufio.Reader
}

func (a *attacker) begin() {
	a.frames = make([]byte, 0, 1<<20+100)
	a.done = make(chan struct{})
	if strings.Contains(a.granted, "snappy") || strings.Contains(a.granted, "deflate") {
		a.pack()
	}
	heapNow() // what pools hold goes with the second collection
	a.base = heapNow()
}

// pack compresses all that will be written: the answer to IDENTIFY as it is, two times OK, and messages.
func (a *attacker) pack() {
	var b bytes.Buffer
	var w interface {
		io.Writer
		Flush() error
	} = snappy.NewBufferedWriter(&b)
	if strings.Contains(a.granted, "deflate") {
		w, _ = flate.NewWriter(&b, 1)
	}
	a.packed = append(a.packed, appendFrame(nil, FrameTypeResponse, []byte(a.granted)))
	for i := range 2 + a.amount {
		if i < 2 {
			_, _ = w.Write(appendFrame(nil, FrameTypeResponse, []byte("OK")))
		} else {
			_, _ = w.Write(a.messageFrame(i, 1<<20))
		}
		_ = w.Flush()
		a.packed = append(a.packed, bytes.Clone(b.Bytes()))
		b.Reset()
	}
}

// measure notes what the consumer's heap has grown to. The attack sends nothing meanwhile, and what it has sent was read.
func (a *attacker) measure() { a.peak = max(a.peak, heapNow()-a.base) }

func (a *attacker) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	go func() {
		defer server.Close()
		c := &attack{attacker: a, nc: server, r: bufio.NewReaderSize(server, 4<<10)}
		c.serve()
	}()
	return client, nil
}

func (a *attack) serve() {
	_, _ = a.r.Discard(len(MagicV2))
	for {
		line, err := a.r.ReadString('\n')
		if err != nil {
			return
		}
		switch command, _, _ := strings.Cut(strings.TrimSpace(line), " "); command {
		case "IDENTIFY":
			a.skipBody()
			if a.identify != nil {
				a.identify(a)
				a.finish()
				return
			}
			a.answer(a.granted)
			a.upgrade()
		case "AUTH":
			a.skipBody()
			a.auth(a)
			a.finish()
			return
		case "SUB":
			a.answer("OK")
		case "RDY":
			if strings.TrimSpace(line) == "RDY 0" {
				continue
			}
			if !a.deaf {
				go func() { _, _ = io.Copy(io.Discard, a.r) }()
			}
			if !a.attack() {
				return // it goes on over the next connection
			}
			a.finish()
			_, _ = io.Copy(io.Discard, a.nc)
			return
		}
	}
}

// attack sends until the amount is sent or the connection is gone, and reports which.
func (a *attack) attack() (over bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	part := max(a.amount/4, 1)
	for ok := true; ok && a.sent < a.amount; a.sent++ {
		if a.sent%part == part-1 {
			a.measure()
		}
		ok = a.send(a)
	}
	a.measure()
	return a.sent == a.amount
}

func (a *attack) finish() {
	select {
	case <-a.done:
	default:
		close(a.done)
	}
}

func (a *attack) skipBody() {
	var size [4]byte
	_, _ = io.ReadFull(a.r, size[:])
	_, _ = a.r.Discard(int(binary.BigEndian.Uint32(size[:])))
}

func (a *attack) upgrade() {
	switch {
	case strings.Contains(a.granted, "snappy"):
		a.r = bufio.NewReader(snappy.NewReader(a.nc))
	case strings.Contains(a.granted, "deflate"):
		a.r = bufio.NewReader(flate.NewReader(a.nc))
	default:
		return
	}
	a.answer("OK")
}

func (a *attack) raw(p []byte) bool {
	if len(a.packed) > 0 {
		p, a.packed = a.packed[0], a.packed[1:]
	}
	_, err := a.nc.Write(p)
	return err == nil
}

func (a *attack) answer(text string) { a.raw(appendFrame(nil, FrameTypeResponse, []byte(text))) }

func (a *attack) frame(typ int32, data []byte) bool {
	return a.raw(appendFrame(a.frames, typ, data))
}

// message sends a message with that number for its ID.
func (a *attack) message(id, size int) bool { return a.raw(a.messageFrame(id, size)) }

func (a *attacker) messageFrame(id, size int) []byte {
	b := binary.BigEndian.AppendUint32(a.frames, uint32(4+messageHeaderSize+size))
	b = binary.BigEndian.AppendUint32(b, uint32(FrameTypeMessage))
	b = fmt.Appendf(append(b, make([]byte, 10)...), "%016x", id)
	return b[:len(b)+size]
}

// A consumer's memory is bounded by max-in-flight times the size of a message, and a fixed amount per connection, whatever
// nsqd sends and whether or not handlers are stuck.
func TestMemoryUnderAttack(t *testing.T) {
	skipUnderRace(t, "how much memory is used")
	const mib = 1 << 20
	const timeouts = `{"msg_timeout":60000,"max_msg_timeout":900000}`
	stuck := func(release chan struct{}) HandlerFunc {
		return func(*Message) error { <-release; return nil }
	}
	quick := func(chan struct{}) HandlerFunc { return func(*Message) error { return nil } }
	forgets := func(chan struct{}) HandlerFunc {
		return func(m *Message) error { m.DisableAutoResponse(); return nil }
	}
	for name, test := range map[string]struct {
		*attacker
		handler     func(release chan struct{}) HandlerFunc
		maxInFlight int
		size        int  // of a message
		expire      bool // messages whose timeout has passed stay with their handlers, beside those in flight
		config      func(cfg *Config)
	}{
		"a huge frame is announced": {
			attacker: &attacker{granted: timeouts, amount: 8, send: func(a *attack) bool {
				return a.raw(append([]byte("\x07\xff\xff\xff\x00\x00\x00\x02"), make([]byte, 1000)...)) && a.sent%2 == 1
			}},
			handler: quick, maxInFlight: 1, size: 1000,
		},
		"a huge response": {
			attacker: &attacker{granted: timeouts, amount: 24, send: func(a *attack) bool {
				if a.sent == 0 {
					a.raw([]byte("\x07\xff\xff\xff\x00\x00\x00\x00"))
				}
				return a.raw(a.frames[:mib])
			}},
			handler: quick, maxInFlight: 1, size: 1000,
		},
		"a huge error": {
			attacker: &attacker{granted: timeouts, amount: 24, send: func(a *attack) bool {
				if a.sent == 0 {
					a.raw([]byte("\x07\xff\xff\xff\x00\x00\x00\x01E_FIN_FAILED "))
				}
				return a.raw(a.frames[:mib])
			}},
			handler: quick, maxInFlight: 1, size: 1000,
		},
		"thousands of small messages at RDY 1": {
			attacker: &attacker{granted: timeouts, amount: 3000, send: func(a *attack) bool { return a.message(a.sent, 100) }},
			handler:  stuck, maxInFlight: 1, size: 100,
		},
		"thousands of medium messages at RDY 1": {
			attacker: &attacker{granted: timeouts, amount: 2000, send: func(a *attack) bool { return a.message(a.sent, 10_000) }},
			handler:  stuck, maxInFlight: 1, size: 10_000,
		},
		"messages of 1 MiB at RDY 1": {
			attacker: &attacker{granted: timeouts, amount: 24, send: func(a *attack) bool { return a.message(a.sent, mib) }},
			handler:  stuck, maxInFlight: 1, size: mib,
		},
		"messages of 1 MiB at RDY 8": {
			attacker: &attacker{granted: timeouts, amount: 24, send: func(a *attack) bool { return a.message(a.sent, mib) }},
			handler:  stuck, maxInFlight: 8, size: mib,
		},
		"messages of 1 MiB from an nsqd that names no timeout": {
			attacker: &attacker{granted: "OK", amount: 24, send: func(a *attack) bool { return a.message(a.sent, mib) }},
			handler:  stuck, maxInFlight: 8, size: mib,
		},
		"one message again and again": {
			attacker: &attacker{granted: timeouts, amount: 5000, send: func(a *attack) bool { return a.message(1, 100) }},
			handler:  stuck, maxInFlight: 1, size: 100,
		},
		"a few messages again and again, of 1 MiB": {
			attacker: &attacker{granted: timeouts, amount: 24, send: func(a *attack) bool { return a.message(a.sent%5, mib) }},
			handler:  stuck, maxInFlight: 4, size: mib, expire: true,
		},
		"messages that expire": {
			attacker: &attacker{granted: `{"msg_timeout":1000}`, amount: 32, send: func(a *attack) bool {
				time.Sleep(time.Second / 4)
				return a.message(a.sent, mib)
			}},
			handler: stuck, maxInFlight: 4, size: mib, expire: true,
		},
		"messages that expire, and that nobody answers": {
			attacker: &attacker{granted: `{"msg_timeout":1000}`, amount: 32, send: func(a *attack) bool {
				time.Sleep(time.Second / 4)
				return a.message(a.sent, mib)
			}},
			handler: forgets, maxInFlight: 4, size: mib,
		},
		"answers are not read": {
			attacker: &attacker{granted: timeouts, deaf: true, amount: 5000, send: func(a *attack) bool { return a.message(a.sent, 100) }},
			handler:  quick, maxInFlight: 1, size: 100, config: func(cfg *Config) { cfg.WriteTimeout = 0 },
		},
		"heartbeats whose answers are not read": {
			attacker: &attacker{granted: timeouts, deaf: true, amount: 5000, send: func(a *attack) bool { return a.frame(FrameTypeResponse, []byte(heartbeat)) }},
			handler:  quick, maxInFlight: 1, size: 100, config: func(cfg *Config) { cfg.WriteTimeout = 0 },
		},
		"responses that nobody expects": {
			attacker: &attacker{granted: timeouts, amount: 2000, send: func(a *attack) bool {
				return a.frame(FrameTypeResponse, bytes.Repeat([]byte("OK"), 10*(a.sent%500)))
			}},
			handler: quick, maxInFlight: 1, size: 100,
		},
		"late answers without end": {
			attacker: &attacker{granted: timeouts, amount: 3000, send: func(a *attack) bool {
				return a.frame(FrameTypeError, fmt.Appendf(nil, "E_FIN_FAILED FIN %016x failed ID not in flight", a.sent))
			}},
			handler: quick, maxInFlight: 1, size: 100,
		},
		"late answers in many words": {
			attacker: &attacker{granted: timeouts, amount: 200, send: func(a *attack) bool {
				return a.frame(FrameTypeError, fmt.Appendf(nil, "E_TOUCH_FAILED TOUCH %016x failed %s", a.sent, strings.Repeat("\n", 50_000)))
			}},
			handler: quick, maxInFlight: 1, size: 100,
		},
		"snappy that grows": {
			attacker: &attacker{granted: `{"snappy":true,"msg_timeout":60000}`, amount: 12, send: func(a *attack) bool { return a.message(a.sent, mib) }},
			handler:  stuck, maxInFlight: 2, size: mib,
		},
		"deflate that grows": {
			attacker: &attacker{granted: `{"deflate":true,"msg_timeout":60000}`, amount: 12, send: func(a *attack) bool { return a.message(a.sent, mib) }},
			handler:  stuck, maxInFlight: 2, size: mib,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := test.attacker
				a.begin()
				cfg := NewConfig()
				cfg.Dial = a.dial
				cfg.MaxInFlight = test.maxInFlight
				if test.config != nil {
					test.config(cfg)
				}
				r, err := NewConsumer("t", "c", cfg)
				require.NoError(t, err)
				r.SetLogger(nil, LogLevelError)
				release := make(chan struct{})
				r.AddConcurrentHandlers(test.handler(release), test.maxInFlight)
				require.NoError(t, r.ConnectToNSQD("nsqd:4150"))
				<-a.done
				close(release)
				r.Stop()
				<-r.StopChan
				allowed := int64(test.maxInFlight*test.size + connMemory)
				if test.expire {
					allowed += int64(test.maxInFlight * test.size)
				}
				require.LessOrEqual(t, a.peak, allowed)
				t.Logf("peak %d KiB, allowed %d KiB", a.peak>>10, allowed>>10)
			})
		})
	}
}

// While connecting, a peer's answers are bounded too: by their size, and all together by the time they may take.
func TestMemoryUnderAttackWhileConnecting(t *testing.T) {
	huge := func(a *attack) {
		ok := a.raw([]byte("\x07\xff\xff\xff\x00\x00\x00\x00{"))
		for ; ok && a.sent < a.amount; a.sent++ {
			ok = a.raw(a.frames[:1<<20])
		}
		a.measure()
	}
	heartbeats := func(a *attack) {
		go func() { _, _ = io.Copy(io.Discard, a.r) }()
		for ok := true; ok && a.sent < a.amount; a.sent++ {
			ok = a.frame(FrameTypeResponse, []byte(heartbeat))
		}
		a.measure()
	}
	for name, a := range map[string]*attacker{
		"an answer to IDENTIFY of 32 MiB": {amount: 32, identify: huge},
		"an answer to AUTH of 32 MiB":     {amount: 32, granted: `{"auth_required":true}`, auth: huge},
		"heartbeats in place of answers":  {amount: 2000, identify: heartbeats},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a.begin()
				cfg := NewConfig()
				cfg.Dial, cfg.AuthSecret = a.dial, "secret"
				c := NewConn("nsqd:4150", cfg, nil)
				c.SetLogger(nil, LogLevelError, "")
				_, err := c.Connect()
				require.Error(t, err)
				<-a.done
				require.LessOrEqual(t, a.peak, int64(connMemory))
				if a.amount == 32 {
					var size *FrameSizeError
					require.ErrorAs(t, err, &size)
					require.EqualValues(t, maxText, size.Max)
				}
			})
		})
	}
}

// Connections that come and go leave nothing behind: neither those of one nsqd, nor those of addresses that change with
// each answer of an nsqlookupd.
func TestMemoryDoesNotGrowWithConnections(t *testing.T) {
	skipUnderRace(t, "how much memory is used")
	for name, poll := range map[string]func(i int) string{
		"the same nsqd again and again": func(int) string { return "nsqd:4150" },
		"another nsqd each time":        func(i int) string { return fmt.Sprintf("nsqd-%d:4150", i) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := NewConfig()
				cfg.LookupdPollInterval, cfg.VanishTimeout = time.Second, 0
				var open, dials atomic.Int32
				var conns sync.Map // the nsqd's ends
				cfg.Dial = func(context.Context, string, string) (net.Conn, error) {
					client, server := net.Pipe()
					open.Add(1)
					dials.Add(1)
					conns.Store(server, nil)
					go func() {
						defer open.Add(-1)
						defer conns.Delete(server)
						defer server.Close()
						c := &attack{attacker: &attacker{granted: "OK", done: make(chan struct{})}, nc: server, r: bufio.NewReader(server)}
						c.serve()
					}()
					return client, nil
				}
				r, err := NewConsumer("t", "c", cfg)
				require.NoError(t, err)
				r.SetLogger(nil, LogLevelError)
				polls := 0
				r.SetLookupdHttpClient(&http.Client{Transport: roundTrip(func(req *http.Request) (*http.Response, error) {
					polls++
					host, _, _ := strings.Cut(poll(polls), ":")
					body := `{"producers":[` + producerJSON(host, 4150) + `]}`
					return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body)), Request: req}, nil
				})})
				r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
				require.NoError(t, r.ConnectToNSQLookupd("lookupd:4161"))
				rounds := func(n int) {
					for range n {
						time.Sleep(time.Second)
						synctest.Wait()
						conns.Range(func(server, _ any) bool { server.(net.Conn).Close(); return true })
					}
				}
				rounds(120) // until maps and the runtime's own have grown to what they need
				heapNow()
				before := heapNow()
				dialled := dials.Load()
				rounds(100)
				heapNow()
				grown := heapNow() - before
				r.Stop()
				<-r.StopChan
				require.Greater(t, dials.Load(), dialled)
				require.Less(t, grown, int64(64<<10), "a connection that stays has more than 7 KiB")
				require.Zero(t, open.Load())
			})
		})
	}
}

// What README.md says of an idle connection.
func TestMemoryOfAnIdleConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := NewConfig()
		cfg.Dial = func(context.Context, string, string) (net.Conn, error) { return idleConn(), nil }
		r, err := NewConsumer("t", "c", cfg)
		require.NoError(t, err)
		r.SetLogger(nil, LogLevelError)
		r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
		require.NoError(t, r.ConnectToNSQD("nsqd-0:4150"))
		const n = 100
		before := heapNow()
		for i := range n {
			require.NoError(t, r.ConnectToNSQD(fmt.Sprintf("nsqd-%d:4150", i+1)))
		}
		synctest.Wait()
		per := (heapNow() - before) / n
		t.Logf("%d bytes", per)
		require.Less(t, per, int64(16<<10))
		r.Stop()
		<-r.StopChan
	})
}

// idleConn is a connection to an nsqd that says what it must, and takes what it gets. It has next to no memory of its own.
func idleConn() net.Conn {
	said := string(appendFrame(appendFrame(nil, FrameTypeResponse, []byte("OK")), FrameTypeResponse, []byte("OK")))
	c := &quietConn{closed: make(chan struct{})}
	c.r = strings.NewReader(said)
	return c
}

// quietConn says what it has to say and then nothing until it is closed.
type quietConn struct {
	saidConn
	closed chan struct{}
	once   sync.Once
}

func (c *quietConn) Read(p []byte) (int, error) {
	if n, err := c.r.Read(p); err == nil {
		return n, nil
	}
	<-c.closed
	return 0, net.ErrClosed
}
func (c *quietConn) Write(p []byte) (int, error) { return len(p), nil }
func (c *quietConn) Close() error                { c.once.Do(func() { close(c.closed) }); return nil }
