package nsq

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// process lets a command take effect. The command's entry in the log and its effect are one step, unless a script or a
// delay comes in between.
func (c *fakeConn) process(cmd fakeCommand) {
	if cmd.end != nil {
		c.closeFor(fakeClosedReason(cmd.end))
		return
	}
	log := &c.nsqd.cluster.fakeLog
	log.mu.Lock()
	defer log.mu.Unlock()
	if c.closed || c.state == fakeFailed {
		return
	}
	b := &c.nsqd.behaviour
	step, onCommand, afterCommand := b.steps[cmd.name()], b.onCommand, b.afterCommand
	c.busy = true
	if onCommand == nil && step.delay <= 0 {
		c.effectLocked(cmd, step)
		c.logLocked(fakeEntry{Kind: entryCommand, Line: cmd.line, Body: cmd.body})
	} else {
		c.logLocked(fakeEntry{Kind: entryCommand, Line: cmd.line, Body: cmd.body})
		handled := false
		c.busy = step.delay <= 0
		log.withoutLock(func() {
			handled = !c.pause(step.delay) || onCommand != nil && onCommand(c, cmd.line, cmd.body)
		})
		c.busy = true
		if !handled {
			c.effectLocked(cmd, step)
		}
	}
	if cmd.name() == "IDENTIFY" {
		c.pushLocked(fakeOut{run: func() error { fakeSignal(c.resume); return nil }})
	}
	if afterCommand != nil {
		log.withoutLock(func() { afterCommand(c, cmd.line) })
	}
}

// effectLocked does what a command asks for, or what the step says instead.
func (c *fakeConn) effectLocked(cmd fakeCommand, step fakeStep) {
	switch {
	case cmd.refusal != "":
		c.refuseLocked(cmd.refusal)
		return
	case step.instead():
		c.insteadLocked(step)
		return
	}
	answer, refusal := c.executeLocked(cmd)
	switch {
	case refusal != "":
		c.refuseLocked(refusal)
	case answer != "" && !step.never:
		c.pushLocked(fakeFrameOut(entryResponse, 0, []byte(answer)))
		if cmd.name() == "IDENTIFY" {
			c.pushUpgradesLocked(cmd.body)
		}
	}
}

// refuseLocked sends an error frame and, if the error is a fatal one, hangs up after it.
func (c *fakeConn) refuseLocked(text string) {
	out := fakeFrameOut(entryError, 1, []byte(text))
	switch code, _, _ := strings.Cut(text, " "); code {
	case "E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED":
		c.nsqd.counts.Failed++
	default:
		c.state, c.rdy = fakeFailed, 0
		out.hangUp = "fatal " + code
	}
	c.pushLocked(out)
}

// insteadLocked does what a step says instead of the real thing.
func (c *fakeConn) insteadLocked(step fakeStep) {
	if step.raw != nil {
		c.pushLocked(fakeOut{entry: fakeEntry{Kind: entryRaw, Body: step.raw}, bytes: step.raw})
	}
	if step.err != "" {
		c.refuseLocked(step.err)
	}
	if step.hangUp {
		c.pushLocked(fakeOut{hangUp: "nsqd hung up"})
	}
}

// executeLocked returns the answer or the refusal of a command; most have neither.
func (c *fakeConn) executeLocked(cmd fakeCommand) (answer, refusal string) {
	words := cmd.words()
	if need := fakeParams[words[0]]; len(words)-1 < need {
		return "", fmt.Sprintf("E_INVALID %s insufficient number of parameters", words[0])
	}
	switch words[0] {
	case "IDENTIFY":
		return c.identifyLocked(cmd.body)
	case "AUTH":
		return c.authLocked(cmd.body)
	case "SUB":
		return c.subLocked(words[1], words[2])
	case "RDY":
		return "", c.rdyLocked(words[1:])
	case "FIN", "REQ", "TOUCH":
		return "", c.answerLocked(words)
	case "CLS":
		return c.clsLocked()
	case "NOP":
		return "", ""
	case "PUB", "MPUB", "DPUB":
		return c.pubLocked(words, cmd.body)
	}
	return "", "E_INVALID invalid command " + cmd.line
}

// fakeParams are the numbers of parameters that commands need.
var fakeParams = map[string]int{"SUB": 2, "FIN": 1, "REQ": 2, "TOUCH": 1, "PUB": 1, "MPUB": 1, "DPUB": 2}

// wrongStateLocked returns the refusal of a command that is not allowed in the connection's state.
func (c *fakeConn) wrongStateLocked(name string, allowed ...fakeState) string {
	for _, state := range allowed {
		if c.state == state {
			return ""
		}
	}
	return fmt.Sprintf("E_INVALID cannot %s in current state", name)
}

// fakeIdentify is the body of IDENTIFY as far as nsqd looks at it.
type fakeIdentify struct {
	FeatureNegotiation  bool `json:"feature_negotiation"`
	HeartbeatInterval   int  `json:"heartbeat_interval"`
	OutputBufferSize    int  `json:"output_buffer_size"`
	OutputBufferTimeout int  `json:"output_buffer_timeout"`
	TLSv1               bool `json:"tls_v1"`
	Snappy              bool `json:"snappy"`
	Deflate             bool `json:"deflate"`
	DeflateLevel        int  `json:"deflate_level"`
	SampleRate          int  `json:"sample_rate"`
	MsgTimeout          int  `json:"msg_timeout"`
}

// check returns the first value that is out of nsqd's range.
func (id *fakeIdentify) check(maxMsgTimeout time.Duration) string {
	for _, field := range []struct {
		name         string
		value        int
		canBeOff     bool
		least, limit int // 0 is fine besides: nsqd's default
	}{
		{"heartbeat interval", id.HeartbeatInterval, true, 1000, 60000},
		{"output buffer size", id.OutputBufferSize, true, 64, 65536},
		{"output buffer timeout", id.OutputBufferTimeout, true, 25, 30000},
		{"sample rate", id.SampleRate, false, 1, 99},
		{"msg timeout", id.MsgTimeout, false, 1000, int(maxMsgTimeout.Milliseconds())},
	} {
		off := field.value == -1 && field.canBeOff
		inRange := field.least <= field.value && field.value <= field.limit
		if field.value != 0 && !off && !inRange {
			return fmt.Sprintf("E_BAD_BODY IDENTIFY %s (%d) is invalid", field.name, field.value)
		}
	}
	return ""
}

func (c *fakeConn) identifyLocked(body []byte) (answer, refusal string) {
	if refusal := c.wrongStateLocked("IDENTIFY", fakeInit); refusal != "" || c.identified {
		return "", "E_INVALID cannot IDENTIFY in current state"
	}
	var id fakeIdentify
	if err := json.Unmarshal(body, &id); err != nil {
		return "", "E_BAD_BODY IDENTIFY failed to decode JSON body"
	}
	b := &c.nsqd.behaviour
	if refusal := id.check(b.maxMsgTimeout); refusal != "" {
		return "", refusal
	}
	if id.FeatureNegotiation && !b.plainOK && b.snappy && id.Snappy && b.deflate && id.Deflate {
		return "", "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"
	}
	c.identified = true
	c.heartbeat = b.heartbeat
	if id.HeartbeatInterval != 0 {
		c.heartbeat = max(0, time.Duration(id.HeartbeatInterval)*time.Millisecond)
	}
	c.msgTimeout = b.msgTimeout
	if id.MsgTimeout != 0 {
		c.msgTimeout = time.Duration(id.MsgTimeout) * time.Millisecond
	}
	if !id.FeatureNegotiation || b.plainOK {
		return "OK", ""
	}
	return c.identifyAnswerLocked(&id), ""
}

func (c *fakeConn) identifyAnswerLocked(id *fakeIdentify) string {
	b := &c.nsqd.behaviour
	fields := map[string]any{
		"max_rdy_count":         b.maxRDY,
		"version":               "1.3.0",
		"max_msg_timeout":       b.maxMsgTimeout.Milliseconds(),
		"msg_timeout":           c.msgTimeout.Milliseconds(),
		"tls_v1":                b.tls && id.TLSv1,
		"snappy":                b.snappy && id.Snappy,
		"deflate":               b.deflate && id.Deflate,
		"deflate_level":         fakeDeflateLevel(id),
		"max_deflate_level":     6,
		"sample_rate":           id.SampleRate,
		"auth_required":         b.authSecret != "",
		"output_buffer_size":    id.OutputBufferSize,
		"output_buffer_timeout": id.OutputBufferTimeout,
	}
	if b.editIdentify != nil {
		b.editIdentify(fields)
	}
	answer, err := json.Marshal(fields)
	mustFake(err)
	return string(answer)
}

func fakeDeflateLevel(id *fakeIdentify) int {
	if id.DeflateLevel <= 0 {
		return 6
	}
	return min(id.DeflateLevel, 6)
}

// pushUpgradesLocked leaves the upgrades that were negotiated for the send loop, in nsqd's order, each with its OK.
func (c *fakeConn) pushUpgradesLocked(body []byte) {
	var id fakeIdentify
	mustFake(json.Unmarshal(body, &id)) // it was read before
	b := &c.nsqd.behaviour
	if !id.FeatureNegotiation || b.plainOK {
		return
	}
	if b.tls && id.TLSv1 {
		config := b.tlsConfig
		c.pushUpgradeLocked("TLS", func() error { return c.upgradeTLS(config) })
	}
	if b.snappy && id.Snappy {
		c.pushUpgradeLocked("SNAPPY", c.upgradeSnappy)
	}
	if b.deflate && id.Deflate {
		c.pushUpgradeLocked("DEFLATE", func() error { return c.upgradeDeflate(fakeDeflateLevel(&id)) })
	}
}

// pushUpgradeLocked leaves one upgrade for the send loop, or what its step says instead.
func (c *fakeConn) pushUpgradeLocked(name string, upgrade func() error) {
	if c.state == fakeFailed {
		return // an upgrade before it was refused
	}
	step := c.nsqd.behaviour.steps[name]
	if step.delay > 0 {
		c.pushLocked(fakeOut{run: func() error { c.pause(step.delay); return nil }})
	}
	switch {
	case step.instead():
		c.insteadLocked(step)
	case step.never:
		c.pushLocked(fakeOut{run: c.ignoreClient})
	default:
		c.pushLocked(fakeOut{run: func() error { return c.upgrade(upgrade) }})
		c.pushLocked(fakeFrameOut(entryResponse, 0, []byte("OK")))
	}
}

// upgrade changes the layers. A client that has not waited for its turn is refused: a real nsqd would lose those bytes.
func (c *fakeConn) upgrade(layer func() error) error {
	if early := c.in.Buffered(); early > 0 {
		return fmt.Errorf("client sent %d bytes before the upgrade", early)
	}
	return layer()
}

// ignoreClient hangs in an upgrade until the client goes away.
func (c *fakeConn) ignoreClient() error {
	if err := c.wire.flush(); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, c.wire); err != nil {
		return err
	}
	return io.EOF
}

func (c *fakeConn) authLocked(secret []byte) (answer, refusal string) {
	want := c.nsqd.behaviour.authSecret
	switch refusal := c.wrongStateLocked("AUTH", fakeInit); {
	case refusal != "" || c.authorized:
		return "", "E_INVALID cannot AUTH in current state"
	case want == "":
		return "", "E_AUTH_DISABLED AUTH disabled"
	case string(secret) != want:
		return "", "E_UNAUTHORIZED AUTH no authorizations found"
	}
	c.authorized = true
	return `{"identity":"fake","identity_url":"https://example.org/fake","permission_count":1}`, ""
}

// fakeName is the rule for names of topics and channels, but for their length.
var fakeName = regexp.MustCompile(`^[.a-zA-Z0-9_-]+(#ephemeral)?$`)

func validFakeName(name string) bool { return len(name) <= 64 && fakeName.MatchString(name) }

func (c *fakeConn) subLocked(topic, channel string) (answer, refusal string) {
	b := &c.nsqd.behaviour
	if refusal := c.wrongStateLocked("SUB", fakeInit); refusal != "" {
		return "", refusal
	}
	switch {
	case c.heartbeat == 0:
		return "", "E_INVALID cannot SUB with heartbeats disabled"
	case !validFakeName(topic):
		return "", fmt.Sprintf("E_BAD_TOPIC SUB topic name %q is not valid", topic)
	case !validFakeName(channel):
		return "", fmt.Sprintf("E_BAD_CHANNEL SUB channel name %q is not valid", channel)
	case b.authSecret != "" && !c.authorized:
		return "", "E_AUTH_FIRST AUTH required before SUB"
	case b.refuseSubs > 0:
		b.refuseSubs--
		return "", "E_SUB_FAILED SUB failed to add client: channel is exiting"
	}
	c.state = fakeSubscribed
	return "OK", ""
}

func (c *fakeConn) rdyLocked(params []string) (refusal string) {
	if c.state == fakeClosing {
		return "" // just ignored
	}
	if refusal := c.wrongStateLocked("RDY", fakeSubscribed); refusal != "" {
		return refusal
	}
	count := int64(1)
	if len(params) > 0 {
		var ok bool
		if count, ok = parseFakeNumber(params[0]); !ok {
			return "E_INVALID RDY could not parse count " + params[0]
		}
	}
	b := &c.nsqd.behaviour
	if count > b.maxRDY {
		return fmt.Sprintf("E_INVALID RDY count %d out of range 0-%d", count, b.maxRDY)
	}
	if b.lateLowered && count < c.rdy && int64(c.inFlight) < c.rdy {
		c.oweLocked(1)
	}
	c.rdy = count
	fakeSignal(c.wake)
	return ""
}

// parseFakeNumber reads digits: nsqd knows no signs.
func parseFakeNumber(s string) (int64, bool) {
	n, err := strconv.ParseUint(s, 10, 63)
	return int64(n), err == nil && !strings.HasPrefix(s, "+")
}

// answerLocked handles FIN, REQ and TOUCH.
func (c *fakeConn) answerLocked(words []string) (refusal string) {
	name, id := words[0], words[1]
	if refusal := c.wrongStateLocked(name, fakeSubscribed, fakeClosing); refusal != "" {
		return refusal
	}
	if len(id) != 16 {
		return "E_INVALID invalid message ID"
	}
	var err error
	switch name {
	case "FIN":
		err = c.nsqd.finishLocked(c, id)
	case "TOUCH":
		err = c.nsqd.touchLocked(c, id)
	case "REQ":
		ms, ok := parseFakeNumber(words[2])
		if !ok {
			return "E_INVALID REQ could not parse timeout " + words[2]
		}
		ms = min(ms, time.Hour.Milliseconds())
		err = c.nsqd.requeueForLocked(c, id, time.Duration(ms)*time.Millisecond)
	}
	if err != nil {
		return fmt.Sprintf("E_%s_FAILED %s %s failed %v", name, name, id, err)
	}
	return ""
}

func (c *fakeConn) clsLocked() (answer, refusal string) {
	if refusal := c.wrongStateLocked("CLS", fakeSubscribed); refusal != "" {
		return "", refusal
	}
	c.state, c.rdy = fakeClosing, 0
	c.oweLocked(c.nsqd.behaviour.stragglers)
	return "CLOSE_WAIT", ""
}

// pubLocked keeps what clients publish. It does not reach the fake's own channel.
func (c *fakeConn) pubLocked(words []string, body []byte) (answer, refusal string) {
	name, topic := words[0], words[1]
	if !validFakeName(topic) {
		return "", fmt.Sprintf("E_BAD_TOPIC %s topic name %q is not valid", name, topic)
	}
	if c.nsqd.behaviour.authSecret != "" && !c.authorized {
		return "", fmt.Sprintf("E_AUTH_FIRST AUTH required before %s", name)
	}
	bodies := [][]byte{body}
	switch name {
	case "DPUB":
		if ms, ok := parseFakeNumber(words[2]); !ok || ms > time.Hour.Milliseconds() {
			return "", "E_INVALID DPUB could not parse timeout " + words[2]
		}
	case "MPUB":
		var err error
		if bodies, err = splitFakeMPUB(body); err != nil {
			return "", "E_BAD_BODY MPUB " + err.Error()
		}
	}
	c.nsqd.published[topic] = append(c.nsqd.published[topic], bodies...)
	return "OK", ""
}

// splitFakeMPUB takes the body of a MPUB apart.
func splitFakeMPUB(p []byte) ([][]byte, error) {
	if len(p) < 4 {
		return nil, errors.New("without a count")
	}
	count, p := binary.BigEndian.Uint32(p), p[4:]
	var bodies [][]byte
	for range count {
		if len(p) < 4 {
			return nil, errors.New("is too short for its count")
		}
		size := binary.BigEndian.Uint32(p)
		if p = p[4:]; size == 0 || size > math.MaxInt32 || int(size) > len(p) {
			return nil, fmt.Errorf("invalid message body size %d", size)
		}
		bodies, p = append(bodies, p[:size]), p[size:]
	}
	if len(p) > 0 {
		return nil, errors.New("is longer than its count")
	}
	return bodies, nil
}
