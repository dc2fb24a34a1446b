package nsq

import (
	"bufio"
	"bytes"
	"compress/flate"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang/snappy"
	"github.com/stretchr/testify/require"
)

// These tests show that the fake does what the others believe. Their client knows nothing of the library either.

// fakeClient is the smallest client that can follow the protocol.
type fakeClient struct {
	t  testing.TB
	nc net.Conn // as dialled
	c  net.Conn // with TLS where there is some
	r  *bufio.Reader
	w  io.Writer
}

// fakeReadFrame is a frame as read.
type fakeReadFrame struct {
	frameType int32
	data      string
}

func (f fakeReadFrame) id() string       { return f.data[10:26] }
func (f fakeReadFrame) body() string     { return f.data[26:] }
func (f fakeReadFrame) attempts() uint16 { return binary.BigEndian.Uint16([]byte(f.data[8:10])) }

func dialFake(t testing.TB, n *fakeNSQD) *fakeClient {
	t.Helper()
	nc, err := n.cluster.Dial(context.Background(), "tcp", n.addr)
	require.NoError(t, err)
	return newFakeClient(t, nc)
}

func newFakeClient(t testing.TB, nc net.Conn) *fakeClient {
	t.Helper()
	t.Cleanup(func() { nc.Close() })
	p := &fakeClient{t: t, nc: nc, c: nc, r: bufio.NewReader(nc), w: nc}
	p.send("  V2")
	return p
}

func (p *fakeClient) send(text string) {
	p.t.Helper()
	_, err := p.w.Write([]byte(text))
	require.NoError(p.t, err)
	if layer, ok := p.w.(interface{ Flush() error }); ok {
		require.NoError(p.t, layer.Flush())
	}
}

func (p *fakeClient) command(format string, args ...any) {
	p.t.Helper()
	p.send(fmt.Sprintf(format, args...) + "\n")
}

func (p *fakeClient) commandWithBody(line, body string) {
	p.t.Helper()
	p.send(line + "\n" + string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body)
}

func (p *fakeClient) tryRead() (fakeReadFrame, error) {
	var header [8]byte
	if _, err := io.ReadFull(p.r, header[:]); err != nil {
		return fakeReadFrame{}, err
	}
	data := make([]byte, binary.BigEndian.Uint32(header[:4])-4)
	_, err := io.ReadFull(p.r, data)
	return fakeReadFrame{int32(binary.BigEndian.Uint32(header[4:])), string(data)}, err
}

func (p *fakeClient) read() fakeReadFrame {
	p.t.Helper()
	f, err := p.tryRead()
	require.NoError(p.t, err)
	return f
}

func (p *fakeClient) expect(frameType int32, text string) {
	p.t.Helper()
	require.Equal(p.t, fakeReadFrame{frameType, text}, p.read())
}

// expectMessage reads a message and returns its id.
func (p *fakeClient) expectMessage(body string, attempts uint16) string {
	p.t.Helper()
	f := p.read()
	require.EqualValues(p.t, 2, f.frameType, f.data)
	require.Equal(p.t, body, f.body())
	require.Equal(p.t, attempts, f.attempts())
	return f.id()
}

// expectNothing checks that nothing comes for a while.
func (p *fakeClient) expectNothing(d time.Duration) {
	p.t.Helper()
	p.nc.SetReadDeadline(time.Now().Add(d))
	f, err := p.tryRead()
	require.ErrorIs(p.t, err, os.ErrDeadlineExceeded, f)
	p.nc.SetReadDeadline(time.Time{})
}

func (p *fakeClient) expectEOF() {
	p.t.Helper()
	_, err := p.tryRead()
	require.ErrorIs(p.t, err, io.EOF)
}

// identify sends IDENTIFY with the given members besides feature_negotiation, and follows the upgrades.
func (p *fakeClient) identify(members string) map[string]any {
	p.t.Helper()
	p.commandWithBody("IDENTIFY", `{"feature_negotiation":true`+members+`}`)
	f := p.read()
	require.EqualValues(p.t, 0, f.frameType, f.data)
	var answer map[string]any
	require.NoError(p.t, json.Unmarshal([]byte(f.data), &answer))
	p.upgrade(answer)
	return answer
}

func (p *fakeClient) upgrade(answer map[string]any) {
	p.t.Helper()
	if answer["tls_v1"] == true {
		conn := tls.Client(p.rest(), &tls.Config{RootCAs: fakeCert().pool, ServerName: "nsqd-1"})
		p.c, p.r, p.w = conn, bufio.NewReader(conn), conn
		p.expect(0, "OK")
	}
	if answer["snappy"] == true {
		p.r, p.w = bufio.NewReader(snappy.NewReader(p.rest())), snappy.NewBufferedWriter(p.c)
		p.expect(0, "OK")
	}
	if answer["deflate"] == true {
		w, err := flate.NewWriter(p.c, 6)
		require.NoError(p.t, err)
		p.r, p.w = bufio.NewReader(flate.NewReader(p.rest())), w
		p.expect(0, "OK")
	}
}

// rest is the connection including what was read too far.
func (p *fakeClient) rest() net.Conn {
	ahead, err := p.r.Peek(p.r.Buffered())
	require.NoError(p.t, err)
	return &fakeAheadConn{p.c, io.MultiReader(bytes.NewReader(ahead), p.c)}
}

type fakeAheadConn struct {
	net.Conn
	r io.Reader
}

func (c *fakeAheadConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func (p *fakeClient) subscribe() *fakeClient {
	p.t.Helper()
	p.identify("")
	p.command("SUB t c")
	p.expect(0, "OK")
	return p
}

// inFakeBubble runs a test with a fake nsqd under synctest.
func inFakeBubble(t *testing.T, test func(t *testing.T, n *fakeNSQD)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		test(t, newFakeNSQD(t))
	})
}

// fakeSession is a short life of a consumer, the same in memory and over TCP.
func fakeSession(t *testing.T, n *fakeNSQD, p *fakeClient) {
	p.subscribe()
	p.command("RDY 2")
	ids := n.publishN(4)
	first, second := p.expectMessage("1", 1), p.expectMessage("2", 1)
	require.Equal(t, ids[:2], []string{first, second})
	require.Equal(t, "0000000000000001", first)

	p.command("FIN %s", first)
	third := p.expectMessage("3", 1)
	p.command("REQ %s 0", second)
	fourth := p.expectMessage("4", 1)
	p.command("TOUCH %s", third)
	p.command("FIN %s", third)
	p.expectMessage("2", 2)
	p.command("CLS")
	p.expect(0, "CLOSE_WAIT")
	p.command("RDY 7")
	p.command("FIN %s", fourth)
	p.command("FIN %s", fourth)
	p.expect(1, "E_FIN_FAILED FIN "+fourth+" failed ID not in flight")
	p.nc.Close()
	n.cluster.waitEntry(byKind(entryClosed), byLine("client"))

	require.Equal(t, []string{
		"IDENTIFY", "SUB t c", "RDY 2", "FIN " + first, "REQ " + second + " 0", "TOUCH " + third, "FIN " + third,
		"CLS", "RDY 7", "FIN " + fourth, "FIN " + fourth,
	}, n.commands())
	require.Equal(t, fakeStats{
		Published: 4, Delivered: 5, Finished: 3, Requeued: 1, Touched: 1, Failed: 1, InFlight: 1, MaxInFlight: 2,
	}, n.stats())
	require.True(t, n.isFinished(first))
	require.False(t, n.isFinished(second))
}

func TestFakeSession(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		fakeSession(t, n, dialFake(t, n))
		now, most := n.cluster.unanswered()
		require.Equal(t, [2]int{1, 2}, [2]int{now, most})
	})
}

func TestFakeSessionOverTCP(t *testing.T) {
	checkNoLeaks(t)
	n := listenFake(t)
	nc, err := net.Dial("tcp", n.addr)
	require.NoError(t, err)
	fakeSession(t, n, newFakeClient(t, nc))

	nc, err = net.Dial("tcp", n.addr)
	require.NoError(t, err)
	p := newFakeClient(t, nc).subscribe()
	n.stopReading()
	p.command("RDY 1")
	n.startReading()
	n.cluster.waitEntry(byLine("RDY 1"))
	n.down()
	_, err = p.tryRead()
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

func TestFakeIDsAreUniquePerNSQDOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := newFakeCluster(t, "nsqd-1:4150", "nsqd-2:4150")
		one := cluster.nsqd("nsqd-1:4150").publishN(2)
		two := cluster.nsqd("nsqd-2:4150").publishN(2)
		require.NotEqual(t, one[0], one[1])
		require.Equal(t, one, two)
	})
}

func TestFakeIdentifyAnswer(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) {
			b.maxRDY = 7
			b.authSecret = "secret"
			b.editIdentify = func(answer map[string]any) { delete(answer, "max_msg_timeout") }
		})
		p := dialFake(t, n)
		answer := p.identify(`,"msg_timeout":2000,"sample_rate":5,"snappy":true`)
		require.EqualValues(t, 7, answer["max_rdy_count"])
		require.EqualValues(t, 2000, answer["msg_timeout"])
		require.Equal(t, true, answer["auth_required"])
		require.Equal(t, false, answer["snappy"])
		require.NotContains(t, answer, "max_msg_timeout")
		require.Contains(t, string(n.cluster.waitEntry(byLine("IDENTIFY")).Body), `"sample_rate":5`)

		p.commandWithBody("AUTH", "secret")
		require.Contains(t, p.read().data, `"permission_count":1`)
		p.command("SUB t c")
		p.expect(0, "OK")

		n.set(func(b *fakeBehaviour) { b.plainOK = true })
		p = dialFake(t, n)
		p.commandWithBody("IDENTIFY", `{"feature_negotiation":true,"tls_v1":true}`)
		p.expect(0, "OK")
	})
}

func TestFakeRefuses(t *testing.T) {
	body := func(command, body string) string {
		return command + "\n" + string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
	}
	const sub = "SUB t c\n"
	for name, test := range map[string]struct{ send, want string }{
		"an unknown command":        {"HELLO\n", "E_INVALID invalid command HELLO"},
		"an empty line":             {"\n", "E_INVALID invalid command "},
		"a body without bytes":      {"IDENTIFY\n\x00\x00\x00\x00", "E_BAD_BODY IDENTIFY invalid body size 0"},
		"broken JSON":               {body("IDENTIFY", "{"), "E_BAD_BODY IDENTIFY failed to decode JSON body"},
		"a short heartbeat":         {body("IDENTIFY", `{"heartbeat_interval":999}`), "E_BAD_BODY IDENTIFY heartbeat interval (999) is invalid"},
		"SUB without heartbeats":    {body("IDENTIFY", `{"heartbeat_interval":-1}`), "OK|E_INVALID cannot SUB with heartbeats disabled"},
		"AUTH that is not asked":    {body("AUTH", "x"), "E_AUTH_DISABLED AUTH disabled"},
		"SUB with one name":         {"SUB t\n", "E_INVALID SUB insufficient number of parameters"},
		"a bad topic":               {"SUB t! c\n", `E_BAD_TOPIC SUB topic name "t!" is not valid`},
		"a bad channel":             {"SUB t c#\n", `E_BAD_CHANNEL SUB channel name "c#" is not valid`},
		"a second SUB":              {sub + sub, "OK|E_INVALID cannot SUB in current state"},
		"RDY before SUB":            {"RDY 1\n", "E_INVALID cannot RDY in current state"},
		"RDY beyond the limit":      {sub + "RDY 2501\n", "OK|E_INVALID RDY count 2501 out of range 0-2500"},
		"a negative RDY":            {sub + "RDY -1\n", "OK|E_INVALID RDY could not parse count -1"},
		"FIN of a short id":         {sub + "FIN 1\n", "OK|E_INVALID invalid message ID"},
		"REQ with a negative delay": {sub + "REQ 0123456789abcdef -1\n", "OK|E_INVALID REQ could not parse timeout -1"},
		"a second CLS":              {sub + "CLS\nCLS\n", "OK|CLOSE_WAIT|E_INVALID cannot CLS in current state"},
		"TOUCH of the unknown":      {sub + "TOUCH 0123456789abcdef\nCLS\nCLS\n", "OK|E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight|CLOSE_WAIT|E_INVALID cannot CLS in current state"},
		"a bad MPUB":                {body("MPUB t", "\x00\x00\x00\x01\x00\x00\x00\x09x"), "E_BAD_BODY MPUB invalid message body size 9"},
		"DPUB beyond an hour":       {body("DPUB t 3600001", "x"), "E_INVALID DPUB could not parse timeout 3600001"},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				p := dialFake(t, n)
				send := test.send
				if strings.HasPrefix(name, "SUB without heartbeats") {
					send += sub
				}
				p.send(send)
				for _, want := range strings.Split(test.want, "|") {
					require.Equal(t, want, p.read().data)
				}
				p.expectEOF()
			})
		})
	}
}

func TestFakeBadBeginnings(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		nc, err := n.cluster.Dial(t.Context(), "tcp", n.addr)
		require.NoError(t, err)
		p := &fakeClient{t: t, nc: nc, r: bufio.NewReader(nc), w: nc}
		p.send("GET / HTTP/1.1\n")
		p.expect(1, "E_BAD_PROTOCOL")
		p.expectEOF()

		p = dialFake(t, n)
		p.send(strings.Repeat("x", 17<<10))
		p.expectEOF()
	})
}

func TestFakeTimeouts(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.msgTimeout, b.maxMsgTimeout = 10*time.Second, 15*time.Second })
		p := dialFake(t, n).subscribe()
		n.publish("m")
		p.command("RDY 1")
		id, sent := p.expectMessage("m", 1), time.Now()
		p.expectMessage("m", 2) // the same connection gets it again
		require.Equal(t, 10*time.Second, time.Since(sent))

		sent = time.Now()
		time.Sleep(9 * time.Second)
		p.command("TOUCH %s", id)
		p.command("RDY 0")
		n.cluster.waitEntries(2, byKind(entryExpired))
		require.Equal(t, 15*time.Second, time.Since(sent), "no more than max_msg_timeout")
		p.command("REQ %s 0", id)
		p.expect(1, "E_REQ_FAILED REQ "+id+" failed ID not in flight")
		require.Equal(t, 2, n.stats().TimedOut)
		require.Equal(t, 1, n.stats().Depth)
	})
}

func TestFakeRequeueDelay(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n).subscribe()
		n.publish("m")
		p.command("RDY 1")
		id, start := p.expectMessage("m", 1), time.Now()
		p.command("REQ %s 5000", id)
		n.cluster.waitEntry(byLine("REQ"))
		require.Equal(t, 1, n.stats().Deferred)
		p.expectMessage("m", 2)
		require.Equal(t, 5*time.Second, time.Since(start))
		require.Zero(t, n.stats().Deferred)
	})
}

func TestFakeMessageOfAnotherConnection(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p, q := dialFake(t, n).subscribe(), dialFake(t, n).subscribe()
		n.publish("m")
		p.command("RDY 1")
		id := p.expectMessage("m", 1)
		q.command("FIN %s", id)
		q.expect(1, "E_FIN_FAILED FIN "+id+" failed client does not own message")

		p.nc.Close() // it stays in flight
		q.command("RDY 1")
		start := time.Now()
		for n.stats().InFlight == 1 && time.Since(start) < time.Minute {
			require.Equal(t, "_heartbeat_", q.read().data)
			q.command("NOP")
		}
		q.expectMessage("m", 2)
		require.Equal(t, []string{"IDENTIFY", "SUB t c", "FIN " + id, "RDY 1"}, n.conn().sent("NOP"))
	})
}

func TestFakeHeartbeats(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n)
		p.identify(`,"heartbeat_interval":1000`)
		start := time.Now()
		for range 5 {
			p.expect(0, "_heartbeat_")
			p.command("NOP")
		}
		require.Equal(t, 5*time.Second, time.Since(start))
		p.expect(0, "_heartbeat_")
		p.expectEOF() // two intervals after the last NOP
		require.Equal(t, 7*time.Second, time.Since(start))
		require.Equal(t, "client is silent", n.cluster.waitEntry(byKind(entryClosed)).Line)
	})
}

func TestFakeFallsSilent(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n).subscribe()
		n.publish("m")
		n.set(func(b *fakeBehaviour) { b.silent = true })
		p.command("RDY 1")
		p.expectNothing(10 * time.Minute)
		n.set(func(b *fakeBehaviour) { b.silent, b.noHeartbeats = false, true })
		id := p.expectMessage("m", 1)
		p.command("FIN %s", id)
		p.expectNothing(10 * time.Minute)
		n.set(func(b *fakeBehaviour) { b.noHeartbeats = false })
		p.expect(0, "_heartbeat_")
		p.command("NOP")
		require.Equal(t, 1, n.stats().Conns)
	})
}

func TestFakeUpgrades(t *testing.T) {
	skipUnderRace(t, "what the fake does")
	t.Parallel()
	for _, layers := range []string{"", "tls_v1", "snappy", "deflate", "tls_v1 snappy", "tls_v1 deflate"} {
		for _, segment := range []int{0, 1, 7, segmentGlue} {
			for _, buffer := range []int{0, 64 << 10} {
				t.Run(fmt.Sprintf("%s/segment %d/buffer %d", layers, segment, buffer), func(t *testing.T) {
					inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
						n.set(func(b *fakeBehaviour) {
							b.tls, b.snappy, b.deflate = true, true, true
							b.segment, b.socketBuffer = segment, buffer
							b.stragglers = 1
						})
						p := dialFake(t, n)
						members := ""
						for _, layer := range strings.Fields(layers) {
							members += `,"` + layer + `":true`
						}
						p.identify(members)
						p.command("SUB t c")
						p.expect(0, "OK")
						large := strings.Repeat("large ", 1000)
						n.publish("m", large, "n")
						p.command("RDY 2")
						p.expectMessage("m", 1)
						p.expectMessage(large, 1)
						p.command("CLS")
						p.expect(0, "CLOSE_WAIT")
						p.expectMessage("n", 1)
					})
				})
			}
		}
	}
}

// TestFakeGlue has the JSON answer, the OK of the upgrade and a first message come in one read.
func TestFakeGlue(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) {
			b.snappy, b.segment = true, segmentGlue
			b.afterCommand = func(c *fakeConn, line string) {
				if line == "IDENTIFY" {
					c.sendMessage("0123456789abcdef", 3, []byte("early"))
				}
			}
		})
		p := dialFake(t, n)
		p.identify(`,"snappy":true`)
		p.expectMessage("early", 3)
		require.Equal(t, 1, p.nc.(*fakeStream).in.writesSoFar())
		require.Equal(t, 2, n.conn().clientWrites(), "the magic, and IDENTIFY with its body")
	})
}

func TestFakeUpgradeRefusesEarlyBytes(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.snappy = true })
		p := dialFake(t, n)
		body := `{"feature_negotiation":true,"snappy":true}`
		p.send("IDENTIFY\n\x00\x00\x00" + string(rune(len(body))) + body + "NOP\n")
		require.Contains(t, p.read().data, `"snappy":true`)
		p.expectEOF()
		require.Contains(t, n.cluster.waitEntry(byKind(entryClosed)).Line, "client sent 4 bytes before the upgrade")
	})
}

func TestFakeUpgradesThatFail(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.tls, b.snappy, b.deflate = true, true, true })
		const identify = `{"feature_negotiation":true,`
		p := dialFake(t, n)
		p.commandWithBody("IDENTIFY", identify+`"snappy":true,"deflate":true}`)
		p.expect(1, "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression")

		n.at("TLS", fakeStep{never: true})
		p = dialFake(t, n)
		p.commandWithBody("IDENTIFY", identify+`"tls_v1":true}`)
		p.read()
		p.expectNothing(time.Hour)
		p.nc.Close()
		n.cluster.waitEntry(byConn(2), byKind(entryClosed))

		n.at("SNAPPY", fakeStep{delay: time.Second, err: "E_IDENTIFY_FAILED snappy"})
		p = dialFake(t, n)
		start := time.Now()
		p.commandWithBody("IDENTIFY", identify+`"snappy":true}`)
		p.read()
		p.expect(1, "E_IDENTIFY_FAILED snappy")
		p.expectEOF()
		require.Equal(t, time.Second, time.Since(start))

		n.at("TLS", fakeStep{})
		p = dialFake(t, n)
		p.commandWithBody("IDENTIFY", identify+`"tls_v1":true}`)
		p.read()
		p.expectEOF() // after the 5 seconds of a handshake
		require.Equal(t, 6*time.Second, time.Since(start))
	})
}

func TestFakeDials(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		dial := func(addr string) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			nc, err := n.cluster.Dial(ctx, "tcp", addr)
			if err == nil {
				t.Cleanup(func() { nc.Close() })
			}
			return err
		}
		require.ErrorContains(t, dial("nsqd-9:4150"), "no such host")

		n.down()
		require.ErrorIs(t, dial(n.addr), syscall.ECONNREFUSED)
		n.setReach(reachHangs)
		start := time.Now()
		require.ErrorIs(t, dial(n.addr), context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(start))

		n.setReach(reachSilent)
		dialFake(t, n).expectNothing(time.Hour)

		n.up()
		n.set(func(b *fakeBehaviour) { b.dialDelay = 100 * time.Millisecond })
		start = time.Now()
		p := dialFake(t, n).subscribe()
		require.Equal(t, 100*time.Millisecond, time.Since(start))
		require.Len(t, n.dialTimes(), 4)
		require.Equal(t, start, n.dialTimes()[3])
		require.Equal(t, 1, n.cluster.openConns())

		n.down()
		_, err := p.tryRead()
		require.ErrorIs(t, err, syscall.ECONNRESET)
		require.Zero(t, n.cluster.openConns())
	})
}

func TestFakeStopsReading(t *testing.T) {
	for _, buffer := range []int{0, 100} {
		t.Run(fmt.Sprintf("buffer %d", buffer), func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.socketBuffer = buffer })
				p := dialFake(t, n).subscribe()
				synctest.Wait() // the fake is in a Read by now
				start := time.Now()
				n.stopReadingFor(10 * time.Second)
				p.nc.SetWriteDeadline(start.Add(time.Second))
				written, err := p.nc.Write(bytes.Repeat([]byte("NOP\n"), 50))
				require.Equal(t, buffer, written)
				require.ErrorIs(t, err, os.ErrDeadlineExceeded)

				p.nc.SetWriteDeadline(time.Time{})
				p.command("RDY 3") // waits for room
				read := n.cluster.waitEntry(byLine("RDY 3"))
				require.Equal(t, 10*time.Second, read.At.Sub(start))
				require.EqualValues(t, 3, n.conn().currentRDY())
			})
		})
	}
}

func TestFakeReadsLate(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n).subscribe()
		n.set(func(b *fakeBehaviour) { b.readDelay = 3 * time.Second })
		start := time.Now()
		p.command("RDY 1")
		time.Sleep(time.Second)
		p.command("RDY 2")
		entries := n.cluster.waitEntries(2, byKind(entryCommand), byLine("RDY"))
		require.Equal(t, 3*time.Second, entries[0].At.Sub(start))
		require.Equal(t, 4*time.Second, entries[1].At.Sub(start))
		require.EqualValues(t, 2, entries[1].RDY)
	})
}

func TestFakeSteps(t *testing.T) {
	for name, test := range map[string]struct {
		step  fakeStep
		check func(p *fakeClient)
	}{
		"an error": {fakeStep{err: "E_SUB_FAILED no"}, func(p *fakeClient) {
			p.expect(1, "E_SUB_FAILED no")
			p.expectEOF()
		}},
		"no answer": {fakeStep{never: true}, func(p *fakeClient) {
			p.expect(0, "_heartbeat_")
		}},
		"a late answer": {fakeStep{delay: 20 * time.Second}, func(p *fakeClient) {
			p.expectNothing(19 * time.Second)
			p.expect(0, "OK")
		}},
		"a closed connection": {fakeStep{hangUp: true}, func(p *fakeClient) {
			p.expectEOF()
		}},
		"a close in mid-frame": {fakeStep{raw: fakeHalfFrame, hangUp: true}, func(p *fakeClient) {
			_, err := p.tryRead()
			require.ErrorIs(p.t, err, io.ErrUnexpectedEOF)
		}},
		"HTTP": {fakeStep{raw: fakeHTTPAnswer, hangUp: true}, func(p *fakeClient) {
			line, err := p.r.ReadString('\n')
			require.NoError(p.t, err)
			require.Equal(p.t, "HTTP/1.1 400 Bad Request\r\n", line)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.at("SUB", test.step)
				p := dialFake(t, n)
				p.identify("")
				p.command("SUB t c")
				test.check(p)
			})
		})
	}
}

func TestFakeByHand(t *testing.T) {
	for name, test := range map[string]struct {
		do   func(c *fakeConn)
		want string
	}{
		"an unknown type":  {func(c *fakeConn) { c.sendFrame(7, []byte("x")) }, "\x00\x00\x00\x05\x00\x00\x00\x07x"},
		"an error":         {func(c *fakeConn) { c.sendError("E_X") }, "\x00\x00\x00\x07\x00\x00\x00\x01E_X"},
		"an unasked OK":    {func(c *fakeConn) { c.sendResponse("OK") }, "\x00\x00\x00\x06\x00\x00\x00\x00OK"},
		"a heartbeat":      {func(c *fakeConn) { c.sendHeartbeat() }, "\x00\x00\x00\x0f\x00\x00\x00\x00_heartbeat_"},
		"a negative size":  {func(c *fakeConn) { c.sendSize(-1) }, "\xff\xff\xff\xff"},
		"a small size":     {func(c *fakeConn) { c.sendSize(3) }, "\x00\x00\x00\x03"},
		"the largest size": {func(c *fakeConn) { c.sendSize(1<<31 - 1) }, "\x7f\xff\xff\xff"},
		"half a frame":     {func(c *fakeConn) { c.closeMidFrame() }, string(fakeHalfFrame)},
		"bytes":            {func(c *fakeConn) { c.sendRaw([]byte("bytes")) }, "bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				p := dialFake(t, n).subscribe()
				c := n.waitSubscribed()
				test.do(c)
				c.close()
				got, err := io.ReadAll(p.r)
				require.NoError(t, err)
				require.Equal(t, test.want, string(got))
			})
		})
	}
}

func TestFakeEndsOfConnections(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n).subscribe()
		n.publish("m")
		p.command("RDY 1")
		id := p.expectMessage("m", 1)
		c := n.conn()
		c.closeWrite()
		p.expectEOF()
		p.command("FIN %s", id) // still read
		n.cluster.waitEntry(byLine("FIN"))
		require.Equal(t, 1, n.stats().Finished)
		c.drop()
		_, err := p.nc.Write([]byte("NOP\n"))
		require.ErrorIs(t, err, syscall.ECONNRESET)

		p = dialFake(t, n).subscribe()
		n.closeAll()
		p.expectEOF()
		_, err = p.nc.Write([]byte("NOP\n"))
		require.ErrorIs(t, err, syscall.EPIPE)
		require.Nil(t, n.conn())

		p = dialFake(t, n).subscribe()
		require.NoError(t, p.nc.(*fakeStream).CloseWrite())
		p.expectEOF() // as nsqd answers a half-close
	})
}

func TestFakeIgnoresRDY(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n).subscribe()
		n.publish("1")
		n.set(func(b *fakeBehaviour) { b.paused = true })
		p.command("RDY 1")
		p.expectNothing(time.Second)
		n.set(func(b *fakeBehaviour) { b.paused, b.lateLowered = false, true })
		p.expectMessage("1", 1)

		p.command("RDY 0")
		n.cluster.waitEntry(byLine("RDY 0"))
		n.publish("2", "3", "4", "5", "6", "7", "8")
		p.expectNothing(time.Second) // there was no room under the old RDY
		n.conn().deliver(1)
		p.expectMessage("2", 1)
		p.command("RDY 3")
		p.expectMessage("3", 1)

		n.conn().deliver(1)
		p.expectMessage("4", 1)
		n.set(func(b *fakeBehaviour) { b.overRDY, b.stragglers = 2, 2 })
		p.expectMessage("5", 1)
		p.command("CLS")
		p.expect(0, "CLOSE_WAIT")
		p.expectMessage("6", 1)
		p.expectMessage("7", 1)
		p.expectNothing(time.Second)
		n.conn().deliver(1)
		p.expectMessage("8", 1)
		require.Equal(t, 8, n.conn().unanswered())
	})
}

func TestFakeLowersRDYLate(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.lateLowered = true })
		p := dialFake(t, n).subscribe()
		p.command("RDY 2")
		p.command("RDY 0")
		n.cluster.waitEntry(byLine("RDY 0"))
		n.publish("1", "2")
		p.expectMessage("1", 1)
		p.expectNothing(time.Second)

		p.command("RDY 3")
		p.expectMessage("2", 1)
		p.command("RDY 0")
		time.Sleep(time.Second)
		n.publish("3")
		p.expectNothing(time.Second) // too late to be late
	})
}

func TestFakeSendsAgain(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n).subscribe()
		n.publish("m")
		p.command("RDY 1")
		id := p.expectMessage("m", 1)
		n.conn().resend(id)
		p.expectMessage("m", 2)
		require.Equal(t, 1, n.stats().InFlight)
		n.expire(id)
		p.expectMessage("m", 3)
		n.expire()
		p.expectMessage("m", 4)

		n.set(func(b *fakeBehaviour) { b.failFIN = true })
		p.command("FIN %s", id)
		p.expect(1, "E_FIN_FAILED FIN "+id+" failed ID not in flight")
		p.expectMessage("m", 5)
	})
}

func TestFakeRefusesSomeSubs(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.refuseSubs = 2 })
		for range 2 {
			p := dialFake(t, n)
			p.command("SUB t c")
			require.Contains(t, p.read().data, "E_SUB_FAILED")
			p.expectEOF()
		}
		dialFake(t, n).subscribe()
	})
}

func TestFakeKeepsWhatIsPublished(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n)
		p.commandWithBody("PUB t", "a")
		p.commandWithBody("DPUB t 100", "b")
		p.commandWithBody("MPUB t", "\x00\x00\x00\x02\x00\x00\x00\x01c\x00\x00\x00\x01d")
		for range 3 {
			p.expect(0, "OK")
		}
		require.Equal(t, []string{"a", "b", "c", "d"}, n.publishedTo("t"))
	})
}

func TestFakeFlood(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		p := dialFake(t, n).subscribe()
		n.flood(0)
		p.command("RDY 100")
		synctest.Wait()
		require.Equal(t, 100, n.stats().InFlight)
		for range 1000 {
			p.command("FIN %s", p.expectMessage("flood", 1))
		}
		n.stopFlood()
		p.command("RDY 0")
		synctest.Wait()
		require.Equal(t, 100, n.stats().MaxInFlight)
		n.closeAll()

		p = dialFake(t, n).subscribe()
		p.command("RDY 100")
		n.flood(time.Second)
		start := time.Now()
		for range 5 {
			p.expectMessage("flood", 1)
		}
		require.Equal(t, 5*time.Second, time.Since(start))
	})
}

func TestFakeScript(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) {
			b.onCommand = func(c *fakeConn, line string, body []byte) bool {
				c.sendResponse("saw " + line + " " + string(body))
				return line != "CLS"
			}
		})
		p := dialFake(t, n)
		p.commandWithBody("AUTH", "x")
		p.expect(0, "saw AUTH x")
		p.command("CLS")
		p.expect(0, "saw CLS ")
		p.expect(1, "E_INVALID cannot CLS in current state")
		p.expectEOF()
	})
}

// TestFakeChecker checks RDY as the model test does: by the entries alone.
func TestFakeChecker(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		next, most := 0, 0
		n.cluster.setChecker(func(e fakeEntry) {
			if e.Seq != next {
				t.Errorf("entry %d came when %d was due", e.Seq, next)
			}
			next++
			most = max(most, e.InFlight)
			if e.Kind == entryMessage && int64(e.InFlight) > e.RDY {
				t.Errorf("beyond RDY: %v", e)
			}
		})
		p := dialFake(t, n).subscribe()
		n.publishN(50)
		p.command("RDY 3")
		for range 50 {
			p.command("FIN %s", p.read().id())
		}
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 50 })
		p.nc.Close()
		n.cluster.waitEntry(byNSQD(n.addr), byKind(entryClosed))
		n.cluster.setChecker(nil)
		require.Equal(t, 3, most)
		require.Len(t, n.cluster.snapshot(), next)
		require.Contains(t, n.cluster.tail(1), "closed: client closed")
	})
}

func TestFakePipe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const text = "0123456789"
		read := func(s *fakeStream) string {
			p := make([]byte, 100)
			n, err := s.Read(p)
			require.NoError(t, err)
			return string(p[:n])
		}

		client, server := newFakePipe(4, "client", "server")
		go client.Write([]byte(text))
		synctest.Wait()
		require.Equal(t, "0123", read(server))
		require.Equal(t, "4567", read(server))
		require.Equal(t, "89", read(server))
		server.SetReadDeadline(time.Now().Add(time.Second))
		_, err := server.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		var timeout net.Error
		require.True(t, errors.As(err, &timeout) && timeout.Timeout())
		server.SetReadDeadline(time.Time{})

		require.NoError(t, client.CloseWrite())
		_, err = server.Read(make([]byte, 1))
		require.Equal(t, io.EOF, err)
		server.Write([]byte("x"))
		require.Equal(t, "x", read(client), "the other direction lives")

		client.Write([]byte("lost"))
		client, server = newFakePipe(4, "client", "server")
		client.Write([]byte("lost"))
		server.Write([]byte("x"))
		client.Close() // with unread input
		_, err = server.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		_, err = client.Read(make([]byte, 1))
		require.ErrorIs(t, err, net.ErrClosed)

		client, server = newFakePipe(0, "client", "server")
		client.SetDeadline(time.Now().Add(time.Second))
		go server.Read(make([]byte, 3))
		n, err := client.Write([]byte(text))
		require.Equal(t, 3, n, "only what was read counts")
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, "server", client.RemoteAddr().String())
		require.Equal(t, "client", client.LocalAddr().String())
	})
}

func TestCheckNoLeaksFindsALeak(t *testing.T) {
	before := goroutineStacks()
	stop := make(chan struct{})
	defer close(stop)
	go func() { <-stop }()
	leaked := waitForGoroutines(before, 0)
	require.Len(t, leaked, 1)
	require.Contains(t, leaked[0], "TestCheckNoLeaksFindsALeak")
}
