package nsqtest

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience is far longer than anything here takes: it ends a test that would hang.
const patience = 20 * time.Second

// eventually asks until the answer is yes.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); {
		if time.Now().After(deadline) {
			require.FailNow(t, "never came true: "+what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// wire speaks NSQ's protocol, byte by byte.
type wire struct {
	net.Conn
	r *bufio.Reader
}

func dialWire(t *testing.T, addr string) *wire {
	t.Helper()
	nc, err := net.DialTimeout("tcp", addr, patience)
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close() })
	w := newWire(t, nc)
	w.send(t, "  V2")
	return w
}

func newWire(t *testing.T, nc net.Conn) *wire {
	t.Helper()
	require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
	return &wire{Conn: nc, r: bufio.NewReader(nc)}
}

func (w *wire) send(t *testing.T, format string, args ...any) {
	t.Helper()
	_, err := fmt.Fprintf(w, format, args...)
	require.NoError(t, err)
}

// sendBody sends a command that is followed by a body.
func (w *wire) sendBody(t *testing.T, command string, body []byte) {
	t.Helper()
	data := append([]byte(command), '\n')
	data = binary.BigEndian.AppendUint32(data, uint32(len(body)))
	_, err := w.Write(append(data, body...))
	require.NoError(t, err)
}

func (w *wire) identify(t *testing.T, request map[string]any) {
	t.Helper()
	body, err := json.Marshal(request)
	require.NoError(t, err)
	w.sendBody(t, "IDENTIFY", body)
}

// frame returns the data of the next frame that is no heartbeat, or the error of reading it.
func (w *wire) frame() (string, error) {
	for {
		var size uint32
		if err := binary.Read(w.r, binary.BigEndian, &size); err != nil {
			return "", err
		}
		frame := make([]byte, size)
		if _, err := io.ReadFull(w.r, frame); err != nil {
			return "", err
		}
		if data := string(frame[4:]); data != "_heartbeat_" {
			return data, nil
		}
	}
}

func (w *wire) mustFrame(t *testing.T) string {
	t.Helper()
	data, err := w.frame()
	require.NoError(t, err)
	return data
}

// selfCommand runs this test binary again.
func selfCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	return exec.Command(program, args...)
}

func (w *wire) subscribe(t *testing.T, topic, channel string, rdy int) {
	t.Helper()
	w.send(t, "SUB %s %s\n", topic, channel)
	require.Equal(t, "OK", w.mustFrame(t))
	w.send(t, "RDY %d\n", rdy)
}

// message returns ID and body of the next message.
func (w *wire) message(t *testing.T) (id, body string) {
	t.Helper()
	data := w.mustFrame(t)
	require.Greater(t, len(data), 26, "a message, not %q", data)
	return data[10:26], data[26:]
}
