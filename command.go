package nsq

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"time"
)

// maxRequeueDelay is the longest delay of a REQ. nsqd cuts longer ones to its max-req-timeout
// anyway, which is an hour by default.
const maxRequeueDelay = time.Hour

// Command is one command to nsqd or nsqlookupd. Make one with Identify, Subscribe, Finish and
// their like; what a hand-made one holds is written as it is.
type Command struct {
	Name   []byte
	Params [][]byte
	Body   []byte // nil: the command has none, which is not the same as an empty one
}

// String returns the command's line, the name and the parameters without the body.
func (c *Command) String() string {
	return string(c.appendLine(nil))
}

// WriteTo writes the command to w in a single Write: the line, and for a Body that is not nil its
// length in four bytes and the body. It returns the number of bytes written and the error of w. A
// Body of 2 GiB and more is an error and nothing is written: nsqd reads lengths as signed.
func (c *Command) WriteTo(w io.Writer) (int64, error) {
	if int64(len(c.Body)) > math.MaxInt32 {
		return 0, fmt.Errorf("nsq: %s: a body of %d bytes is more than the protocol can tell", c.Name, len(c.Body))
	}
	b := appendCommand(make([]byte, 0, c.wireSize()), c)
	n, err := w.Write(b)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return int64(n), err
}

func (c *Command) wireSize() int {
	n := len(c.Name) + 1
	for _, p := range c.Params {
		n += 1 + len(p)
	}
	if c.Body != nil {
		n += 4 + len(c.Body)
	}
	return n
}

func (c *Command) appendLine(dst []byte) []byte {
	dst = append(dst, c.Name...)
	for _, p := range c.Params {
		dst = append(dst, ' ')
		dst = append(dst, p...)
	}
	return dst
}

// appendCommand appends the bytes that WriteTo would write.
func appendCommand(dst []byte, c *Command) []byte {
	dst = slices.Grow(dst, c.wireSize())
	dst = c.appendLine(dst)
	dst = append(dst, '\n')
	if c.Body != nil {
		dst = binary.BigEndian.AppendUint32(dst, uint32(len(c.Body)))
		dst = append(dst, c.Body...)
	}
	return dst
}

// The append forms of what a consumer sends per message. They allocate only to grow dst.

// appendFinish appends the bytes of Finish(id).
func appendFinish(dst []byte, id MessageID) []byte {
	dst = append(dst, "FIN "...)
	dst = append(dst, id[:]...)
	return append(dst, '\n')
}

// appendRequeue appends the bytes of Requeue(id, delay).
func appendRequeue(dst []byte, id MessageID, delay time.Duration) []byte {
	dst = append(dst, "REQ "...)
	dst = append(dst, id[:]...)
	dst = append(dst, ' ')
	dst = strconv.AppendInt(dst, requeueMillis(delay), 10)
	return append(dst, '\n')
}

// appendTouch appends the bytes of Touch(id).
func appendTouch(dst []byte, id MessageID) []byte {
	dst = append(dst, "TOUCH "...)
	dst = append(dst, id[:]...)
	return append(dst, '\n')
}

// appendReady appends the bytes of Ready(n).
func appendReady(dst []byte, n int64) []byte {
	dst = append(dst, "RDY "...)
	dst = strconv.AppendInt(dst, max(n, 0), 10)
	return append(dst, '\n')
}

// requeueMillis keeps a delay in what nsqd accepts: a minus sign would cost the connection.
func requeueMillis(delay time.Duration) int64 {
	return min(max(delay, 0), maxRequeueDelay).Milliseconds()
}

func newCommand(name string, body []byte, params ...string) *Command {
	c := &Command{Name: []byte(name), Body: body}
	for _, p := range params {
		c.Params = append(c.Params, []byte(p))
	}
	return c
}

// Identify returns the IDENTIFY command, which tells nsqd about the client and asks for features.
// Its body is the JSON of js; the error is that of encoding it.
// The fields: <https://nsq.io/clients/tcp_protocol_spec.html#identify>.
func Identify(js map[string]interface{}) (*Command, error) {
	body, err := json.Marshal(js)
	if err != nil {
		return nil, fmt.Errorf("nsq: IDENTIFY: %w", err)
	}
	return newCommand("IDENTIFY", body), nil
}

// Auth returns the AUTH command, with the secret as its body. The error is always nil.
func Auth(secret string) (*Command, error) {
	return newCommand("AUTH", []byte(secret)), nil
}

// Subscribe returns the SUB command, which makes a connection a consumer of one channel of a
// topic. nsqd takes one per connection.
func Subscribe(topic, channel string) *Command {
	return newCommand("SUB", nil, topic, channel)
}

// Ready returns the RDY command, which sets how many unanswered messages nsqd may have sent on the
// connection at a time. A negative count becomes 0, because nsqd closes the connection over a minus sign.
func Ready(count int) *Command {
	return newCommand("RDY", nil, strconv.Itoa(max(count, 0)))
}

// Finish returns the FIN command, which tells nsqd that a message is done with.
func Finish(id MessageID) *Command {
	return newCommand("FIN", nil, string(id[:]))
}

// Requeue returns the REQ command, which gives a message back to nsqd, to be delivered again after
// delay. The delay is sent in whole milliseconds, rounded down; a negative one becomes 0 and one above an
// hour an hour.
func Requeue(id MessageID, delay time.Duration) *Command {
	return newCommand("REQ", nil, string(id[:]), strconv.FormatInt(requeueMillis(delay), 10))
}

// Touch returns the TOUCH command, which starts a message's timeout afresh.
func Touch(id MessageID) *Command {
	return newCommand("TOUCH", nil, string(id[:]))
}

// StartClose returns the CLS command, after which nsqd sends no more messages on the connection.
// It answers CLOSE_WAIT.
func StartClose() *Command {
	return newCommand("CLS", nil)
}

// Nop returns the NOP command, which does nothing: the usual answer to a heartbeat.
func Nop() *Command {
	return newCommand("NOP", nil)
}

// Publish returns the PUB command, which adds a message to a topic. nsqd refuses an empty body.
func Publish(topic string, body []byte) *Command {
	return newCommand("PUB", bodyOf(body), topic)
}

// DeferredPublish returns the DPUB command: a PUB of a message that is delivered only after delay,
// in whole milliseconds, rounded down. The delay is written as it is: nsqd closes the connection over one that is
// negative or above its max-req-timeout (an hour by default).
func DeferredPublish(topic string, delay time.Duration, body []byte) *Command {
	return newCommand("DPUB", bodyOf(body), topic, strconv.FormatInt(delay.Milliseconds(), 10))
}

// MultiPublish returns the MPUB command, which adds several messages to a topic, all or none. The
// error is that of bodies which together have 2 GiB or more.
func MultiPublish(topic string, bodies [][]byte) (*Command, error) {
	size := int64(4)
	for _, b := range bodies {
		size += 4 + int64(len(b))
	}
	if size > math.MaxInt32 {
		return nil, fmt.Errorf("nsq: MPUB: a body of %d bytes is more than the protocol can tell", size)
	}
	body := make([]byte, 0, size)
	body = binary.BigEndian.AppendUint32(body, uint32(len(bodies)))
	for _, b := range bodies {
		body = binary.BigEndian.AppendUint32(body, uint32(len(b)))
		body = append(body, b...)
	}
	return newCommand("MPUB", body, topic), nil
}

// bodyOf keeps the length field of a command that must have one.
func bodyOf(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// Register returns the REGISTER command, by which an nsqd tells nsqlookupd of a topic or, if
// channel is not empty, of a channel.
func Register(topic, channel string) *Command {
	return registration("REGISTER", topic, channel)
}

// UnRegister returns the UNREGISTER command, which takes a Register back.
func UnRegister(topic, channel string) *Command {
	return registration("UNREGISTER", topic, channel)
}

func registration(name, topic, channel string) *Command {
	if channel == "" {
		return newCommand(name, nil, topic)
	}
	return newCommand(name, nil, topic, channel)
}

// Ping returns the PING command, by which an nsqd shows nsqlookupd that it is alive.
func Ping() *Command {
	return newCommand("PING", nil)
}
