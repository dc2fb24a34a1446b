package nsq

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// recordedConn keeps what is written to it.
type recordedConn struct {
	net.Conn

	mu    sync.Mutex // guards wrote
	wrote []byte
}

func (c *recordedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wrote = append(c.wrote, p[:n]...)
	return n, err
}

func (c *recordedConn) bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Clone(c.wrote)
}

// nasty are texts that would be commands of their own where they were written as they are.
var nasty = map[string]string{
	"quotes":        `a"b\c'd`,
	"a line end":    "x\nFIN 0123456789abcdef\nCLS\n",
	"a CR LF":       "x\r\nRDY 2500\r\n",
	"a NUL":         "x\x00y",
	"no UTF-8":      "x\xff\xfey",
	"JSON":          `","tls_v1":true,"snappy":true,"x":"`,
	"HTML":          "</script>\u2028",
	"blanks":        "  a b  ",
	"nothing":       "",
	"a long one":    strings.Repeat("long ", 5000),
	"a frame":       "\x00\x00\x00\x06\x00\x00\x00\x00OK",
	"another magic": "  V1",
}

// What a config says travels in bodies of a told length, so that no text in it can be a command.
func TestTextsOfTheConfigAreNoCommands(t *testing.T) {
	for name, text := range nasty {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				secret := "s" + text
				n.set(func(b *fakeBehaviour) { b.authSecret = secret })
				var sent *recordedConn
				r := unconnected(t, n, func(cfg *Config) {
					for _, option := range []string{"client_id", "hostname", "user_agent", "topology_region", "topology_zone"} {
						require.NoError(t, cfg.Set(option, text))
					}
					cfg.AuthSecret = secret
					cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
						nc, err := n.cluster.Dial(ctx, network, addr)
						sent = &recordedConn{Conn: nc}
						return sent, err
					}
				})
				require.NoError(t, r.ConnectToNSQD(n.addr))
				synctest.Wait()
				require.Equal(t, []string{"IDENTIFY", "AUTH", "SUB t c", "RDY 1"}, n.commands())

				rest, ok := bytes.CutPrefix(sent.bytes(), []byte("  V2IDENTIFY\n"))
				require.True(t, ok)
				size := binary.BigEndian.Uint32(rest)
				var fields map[string]any
				require.NoError(t, json.Unmarshal(rest[4:4+size], &fields))
				want := strings.ToValidUTF8(strings.ReplaceAll(text, "\xff\xfe", "\ufffd\ufffd"), "")
				for _, field := range []string{"client_id", "short_id", "hostname", "long_id", "user_agent", "topology_region", "topology_zone"} {
					require.Equal(t, want, fields[field], field)
				}
				require.Equal(t, []any{false, false, true}, []any{fields["tls_v1"], fields["snappy"], fields["feature_negotiation"]})
				auth := "AUTH\n" + string(binary.BigEndian.AppendUint32(nil, uint32(len(secret)))) + secret
				require.Equal(t, auth+"SUB t c\nRDY 1\n", string(rest[4+size:]))
			})
		})
	}
}

// A topic or channel that isn't one never gets as far as a connection or a query.
func TestNastyNamesAreRefused(t *testing.T) {
	for name, text := range nasty {
		for _, topic := range []string{text, text + "#ephemeral", "t\n" + text} {
			_, err := NewConsumer(topic, "c", NewConfig())
			require.EqualError(t, err, "invalid topic name", name)
			_, err = NewConsumer("t", topic, NewConfig())
			require.EqualError(t, err, "invalid channel name", name)
		}
	}
}

// Addresses that nsqlookupds list are dialled only if they are addresses: anybody can register at an nsqlookupd.
func TestNastyDiscoveredAddressesAreNotDialled(t *testing.T) {
	producer := func(host string, port any) string {
		h, err := json.Marshal(host)
		require.NoError(t, err)
		return fmt.Sprintf(`{"broadcast_address":%s,"tcp_port":%v}`, h, port)
	}
	bad := []string{
		producer("a", -1), producer("a", 0), producer("a", 65536), producer("a", int64(1)<<40), producer("a", "4150.5"),
		producer("a", `"4150"`), producer("a", `"4150\nSUB t c"`), producer("a", "null"), producer("a", "[4150]"), producer("a", "1e9"),
		producer("a", "-0"), producer("a", "4150e0"),
		producer("/var/run/docker.sock", 4150), producer("unix:/x", 4150), producer("./x", 4150), producer("../x", 4150),
		producer("http://a", 4150), producer("user:pass@a", 4150), producer("a:4150/x?", 4150), producer("a%0ab", 4150),
		producer("a\u2028b", 4150), producer("a\u202eb", 4150), producer("[::1]:4150", 4150), producer("::1]", 4150),
		producer("$(reboot)", 4150), producer("a;b", 4150), producer(strings.Repeat("a", 300), 4150),
	}
	for _, text := range nasty {
		bad = append(bad, producer(text, 4150))
	}
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		lookupds.at("l1:4161").respondWith(200, `{"producers":[`+strings.Join(append(bad, producer("nsqd-1", 4150)), ",")+`]}`)
		n := newFakeNSQD(t)
		var dialled []string
		r := newDiscoveringConsumer(t, n.cluster, lookupds, func(cfg *Config) {
			cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dialled = append(dialled, network+" "+addr)
				return n.cluster.Dial(ctx, network, addr)
			}
		})
		log := logTo(r)
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		require.Equal(t, []string{n.addr}, nsqdsConnected(r), "the good one among them")
		time.Sleep(5 * time.Minute)
		require.Equal(t, []string{"tcp nsqd-1:4150"}, dialled)
		require.Len(t, log.matching("WRN", fmt.Sprintf(`nsqlookupd .* lists %d nsqds that can't be dialled`, len(bad))), 1, "said once")
		for _, line := range log.all() {
			require.Equal(t, printable(line), line)
			require.Less(t, len(line), 1200)
		}
	})
}

// A command that a program makes of texts from elsewhere is one command or none.
func TestWriteCommandRefusesLineEnds(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		c := lowLevelConn(t, n, nil, nil)
		_, err := c.Connect()
		require.NoError(t, err)
		for _, cmd := range []*Command{
			Subscribe("t\nRDY 1", "c"), Subscribe("t", "c\n"), Publish("t\nCLS", []byte("x")), {Name: []byte("NOP\nCLS")}, {Name: []byte("SUB t c\n")},
		} {
			err := c.WriteCommand(cmd)
			require.ErrorContains(t, err, "line end")
			require.Equal(t, printable(err.Error()), err.Error())
		}
		require.NoError(t, c.WriteCommand(Publish("t", []byte("a body\nmay have one"))))
		synctest.Wait()
		require.Equal(t, []string{"IDENTIFY", "PUB t"}, n.commands())
		require.NoError(t, c.Close())
		synctest.Wait()
	})
}
