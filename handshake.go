package nsq

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"runtime/debug"
	"strings"
	"time"
)

// defaultMaxRDY is nsqd's own default, for servers too old to tell.
const defaultMaxRDY = 2500

// defaultHeartbeat is nsqd's heartbeat interval where a client asks for none: half of its client timeout.
const defaultHeartbeat = 30 * time.Second

// defaultAnswerTimeout bounds the steps of connecting when Config.ReadTimeout is 0.
const defaultAnswerTimeout = 60 * time.Second

// IdentifyResponse is what nsqd says about itself and grants in answer to IDENTIFY.
// See https://nsq.io/clients/tcp_protocol_spec.html#identify.
type IdentifyResponse struct {
	MaxRdyCount  int64 `json:"max_rdy_count"` // the highest RDY nsqd takes
	TLSv1        bool  `json:"tls_v1"`
	Deflate      bool  `json:"deflate"`
	Snappy       bool  `json:"snappy"`
	AuthRequired bool  `json:"auth_required"`

	Version       string `json:"version"`         // of nsqd
	MsgTimeout    int64  `json:"msg_timeout"`     // in milliseconds, for this connection; 0: not told
	MaxMsgTimeout int64  `json:"max_msg_timeout"` // in milliseconds: how far TOUCH can extend it; 0: not told
}

// AuthResponse is nsqd's answer to AUTH. See https://nsq.io/clients/tcp_protocol_spec.html#auth.
type AuthResponse struct {
	Identity        string `json:"identity"`
	IdentityUrl     string `json:"identity_url"`
	PermissionCount int64  `json:"permission_count"`
}

// handshake dials and goes through IDENTIFY, the upgrades that it grants, and AUTH. Each answer is waited for, for
// Config.ReadTimeout at most. It returns nil with nil for an nsqd that answers IDENTIFY with a plain OK.
// After an error nothing is left open.
func (c *Conn) handshake(ctx context.Context) (*IdentifyResponse, error) {
	nc, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.transport = newTransport(nc, c.config.WriteTimeout)
	c.mu.Unlock()
	stop := context.AfterFunc(ctx, c.transport.close)
	resp, err := c.negotiate(ctx)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		c.transport.close()
		return nil, err
	}
	c.mu.Lock()
	c.remote = nc.RemoteAddr()
	c.mu.Unlock()
	return resp, nil
}

func (c *Conn) dial(ctx context.Context) (net.Conn, error) {
	network, address, err := parseNSQDAddress(c.addr)
	if err != nil {
		return nil, err
	}
	if c.config.DialTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.config.DialTimeout)
		defer cancel()
	}
	if c.config.Dial != nil {
		return c.dialUser(ctx, network, address)
	}
	// A name is resolved anew each time. Keep-alive probes are on by default.
	d := net.Dialer{}
	if network == "tcp" {
		d.LocalAddr = c.config.LocalAddr
	}
	return d.DialContext(ctx, network, address)
}

// dialUser calls Config.Dial, but does not trust it to mind its context.
func (c *Conn) dialUser(ctx context.Context, network, address string) (net.Conn, error) {
	type result struct {
		nc  net.Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		r := result{nil, errors.New("nsq: Config.Dial ended its goroutine")}
		defer func() {
			if p := recover(); p != nil {
				r = result{nil, fmt.Errorf("nsq: Config.Dial panicked: %v\n%s", p, debug.Stack())}
			}
			done <- r
		}()
		nc, err := c.config.Dial(ctx, network, address)
		if isNil(nc) { // also what tls.Dial returns with an error, which is no nil any more as a net.Conn
			nc = nil
		}
		if nc == nil && err == nil {
			err = errors.New("nsq: Config.Dial returned neither a connection nor an error")
		}
		r = result{nc, err}
	}()
	select {
	case r := <-done:
		if r.err != nil && r.nc != nil {
			_ = r.nc.Close()
			r.nc = nil
		}
		return r.nc, r.err
	case <-ctx.Done():
		go func() {
			if r := <-done; r.nc != nil {
				_ = r.nc.Close()
			}
		}()
		return nil, fmt.Errorf("nsq: dialling %s: %w", c.addr, context.Cause(ctx))
	}
}

// negotiate is the handshake on a fresh connection.
func (c *Conn) negotiate(ctx context.Context) (*IdentifyResponse, error) {
	data, err := c.identify()
	if err != nil {
		return nil, err
	}
	var resp *IdentifyResponse
	switch {
	case len(data) > 0 && data[0] == '{':
		resp = new(IdentifyResponse)
		if err := json.Unmarshal(data, resp); err != nil {
			return nil, ErrIdentify{cutText(err.Error())} // it quotes the answer
		}
		c.log.logf(LogLevelDebug, "IDENTIFY response: %s", printable(cutText(fmt.Sprintf("%+v", *resp))))
	case string(data) == "OK":
		c.log.logf(LogLevelDebug, "IDENTIFY response: OK")
	default:
		return nil, ErrIdentify{fmt.Sprintf("unexpected answer %.64q", data)}
	}
	granted := IdentifyResponse{}
	if resp != nil {
		granted = *resp
	}
	if err := c.upgrade(ctx, granted); err != nil {
		return nil, err
	}
	c.adopt(granted)
	if granted.AuthRequired {
		if err := c.authenticate(); err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// identify sends the magic and IDENTIFY and returns the answer.
func (c *Conn) identify() ([]byte, error) {
	cmd, err := Identify(identifyFields(c.config))
	if err != nil {
		return nil, ErrIdentify{err.Error()}
	}
	start := time.Now()
	if err := c.transport.write(appendCommand([]byte(MagicV2), cmd)); err != nil {
		return nil, err
	}
	data, err := c.await("IDENTIFY")
	c.noteRoundTrip(start)
	var refused *ProtocolError
	if errors.As(err, &refused) {
		return nil, ErrIdentify{refused.Error()}
	}
	return data, err
}

// identifyFields are the fields of IDENTIFY, all that nsqd knows. short_id and long_id are what nsqd before 0.2.28
// calls client_id and hostname.
func identifyFields(cfg *Config) map[string]any {
	fields := map[string]any{
		"client_id":             cfg.ClientID,
		"hostname":              cfg.Hostname,
		"short_id":              cfg.ClientID,
		"long_id":               cfg.Hostname,
		"user_agent":            cfg.UserAgent,
		"feature_negotiation":   true,
		"tls_v1":                cfg.TlsV1,
		"deflate":               cfg.Deflate,
		"deflate_level":         cfg.DeflateLevel,
		"snappy":                cfg.Snappy,
		"sample_rate":           cfg.SampleRate,
		"heartbeat_interval":    offOrMilliseconds(cfg.HeartbeatInterval),
		"output_buffer_size":    cfg.OutputBufferSize,
		"output_buffer_timeout": offOrMilliseconds(cfg.OutputBufferTimeout),
		"msg_timeout":           cfg.MsgTimeout.Milliseconds(),
		"topology_region":       cfg.TopologyRegion,
		"topology_zone":         cfg.TopologyZone,
	}
	return fields
}

// offOrMilliseconds is how IDENTIFY wants a duration: in milliseconds, -1 for off.
func offOrMilliseconds(d time.Duration) int64 {
	if d < 0 {
		return -1
	}
	return d.Milliseconds()
}

// upgrade goes through the layers that nsqd granted, in the protocol's order.
func (c *Conn) upgrade(ctx context.Context, granted IdentifyResponse) error {
	switch {
	case granted.TLSv1:
		if err := c.upgradeTLS(ctx); err != nil {
			return err
		}
	case c.config.TlsV1:
		return ErrTLSRefused // never in clear text what was meant to be encrypted
	}
	switch {
	case granted.Snappy:
		c.log.logf(LogLevelInfo, "upgrading to Snappy")
		c.transport.addSnappy()
		return c.awaitOK("snappy")
	case granted.Deflate:
		c.log.logf(LogLevelInfo, "upgrading to Deflate")
		if err := c.transport.addDeflate(c.config.DeflateLevel); err != nil {
			return err
		}
		return c.awaitOK("deflate")
	case c.config.Snappy || c.config.Deflate:
		c.log.logf(LogLevelWarning, "nsqd does not offer the compression asked for, going on without")
	}
	return nil
}

func (c *Conn) upgradeTLS(ctx context.Context) error {
	c.log.logf(LogLevelInfo, "upgrading to TLS")
	cfg := c.config.TlsConfig.Clone() // nil gives nil
	if cfg == nil {
		cfg = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if cfg.ServerName == "" {
		cfg.ServerName = hostOf(c.addr)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, c.answerTimeout(), &TimeoutError{"TLS"})
	defer cancel()
	conn := tls.Client(c.transport.socket, cfg)
	if err := c.limitAnswer(); err != nil {
		return err
	}
	handshake := func() (err error) {
		defer contain(&err, "a callback of the TLS config")
		return conn.HandshakeContext(ctx)
	}
	if err := handshake(); err != nil {
		return cmp.Or(context.Cause(ctx), stepError(err, "TLS"))
	}
	c.transport.addTLS(conn)
	return c.awaitOK("TLS")
}

// hostOf is the part of an address that a certificate is made for.
func hostOf(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return "localhost" // a Unix socket
	}
	host, _, _ = strings.Cut(host, "%") // the zone of an IPv6 address, which is this machine's own
	return strings.TrimSuffix(host, ".")
}

// adopt remembers what was negotiated.
func (c *Conn) adopt(granted IdentifyResponse) {
	maxRDY := granted.MaxRdyCount
	if maxRDY <= 0 {
		maxRDY = defaultMaxRDY
	}
	timeout := c.config.MsgTimeout
	if granted.MsgTimeout > 0 {
		timeout = milliseconds(granted.MsgTimeout)
	}
	c.maxRDY.Store(maxRDY)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.msgTimeout = min(max(timeout, 0), maxTimeout)
	c.maxMsgTimeout = milliseconds(granted.MaxMsgTimeout)
}

// maxTimeout stands for longer ones: added to the present time they must not come out in the past.
const maxTimeout = math.MaxInt64 / 4

// milliseconds is a time as nsqd tells it, 0 for one that is none.
func milliseconds(n int64) time.Duration {
	return time.Duration(min(max(n, 0), maxTimeout/int64(time.Millisecond))) * time.Millisecond
}

func (c *Conn) authenticate() error {
	if c.config.AuthSecret == "" {
		c.log.logf(LogLevelError, "Auth Required")
		return errAuthRequired
	}
	cmd, err := Auth(c.config.AuthSecret)
	if err != nil {
		return err
	}
	if err := c.transport.write(appendCommand(nil, cmd)); err != nil {
		return err
	}
	data, err := c.await("AUTH")
	var refused *ProtocolError
	if errors.As(err, &refused) {
		c.log.logf(LogLevelError, "Auth Failed %s", refused)
		return &authError{refused}
	}
	if err != nil {
		return err
	}
	var resp AuthResponse
	if err := json.Unmarshal(data, &resp); err != nil {
		return &authError{err}
	}
	shown := func(text string) string { return printable(cutText(withoutSecret(text, c.config.AuthSecret))) }
	c.log.logf(LogLevelInfo, "Auth accepted. Identity: %s %s Permissions: %d",
		shown(resp.Identity), shown(resp.IdentityUrl), resp.PermissionCount)
	return nil
}

// The text is go-nsq's, which programs know.
var errAuthRequired = errors.New("Auth Required")

// authError is a failed AUTH, in go-nsq's words.
type authError struct{ err error }

func (e *authError) Error() string {
	return "Error authenticating " + printable(cutText(e.err.Error()))
}
func (e *authError) Unwrap() error { return e.err }

// subscribe sends SUB and waits for the answer.
func (c *Conn) subscribe(ctx context.Context, topic, channel string) error {
	stop := context.AfterFunc(ctx, c.transport.close)
	start := time.Now()
	err := c.transport.write(appendCommand(nil, Subscribe(topic, channel)))
	if err == nil {
		err = c.awaitOK("SUB")
	}
	c.noteRoundTrip(start)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		c.transport.close()
	}
	return err
}

// awaitOK waits for the answer OK.
func (c *Conn) awaitOK(step string) error {
	data, err := c.await(step)
	if err == nil && string(data) != "OK" {
		err = &UnexpectedAnswerError{Step: step, Answer: fmt.Sprintf("%.64q", withoutSecret(string(data), c.config.AuthSecret))}
	}
	return err
}

// await reads the answer to one step of the handshake, and answers heartbeats meanwhile. It reads no further than the
// answer: what follows may belong to another layer. An error frame is a *ProtocolError.
func (c *Conn) await(step string) ([]byte, error) {
	if err := c.limitAnswer(); err != nil {
		return nil, err
	}
	for {
		frameType, data, err := ReadUnpackedResponse(c.transport.r, min(frameLimit(c.config.MaxMsgSize), maxText))
		switch {
		case err != nil:
			return nil, stepError(err, step)
		case frameType == FrameTypeError:
			return nil, c.parseError(data)
		case frameType != FrameTypeResponse:
			return nil, &UnexpectedFrameError{frameType}
		case string(data) != heartbeat:
			return data, nil
		}
		if err := c.transport.write(nopLine); err != nil {
			return nil, err
		}
	}
}

// parseError is parseProtocolError without the secret: some servers send back what they were sent.
func (c *Conn) parseError(data []byte) *ProtocolError {
	if secret := []byte(c.config.AuthSecret); len(secret) > 0 && bytes.Contains(data, secret) {
		data = bytes.ReplaceAll(data, secret, []byte(concealed))
	}
	return parseProtocolError(data)
}

// limitAnswer sets the deadline for all of the next answer: a trickle does not extend it.
func (c *Conn) limitAnswer() error {
	return c.transport.socket.SetReadDeadline(time.Now().Add(c.answerTimeout()))
}

func (c *Conn) answerTimeout() time.Duration {
	return cmp.Or(c.config.ReadTimeout, defaultAnswerTimeout)
}

// stepError says at which step of the handshake the stream failed.
func stepError(err error, step string) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &TimeoutError{step}
	}
	return &stepFailure{step, err}
}

// stepFailure is a stream that failed at a step of the handshake.
type stepFailure struct {
	step string
	err  error
}

// Error is printable: what is wrong with a certificate is told with its names, which are the peer's.
func (e *stepFailure) Error() string {
	return "nsq: waiting for nsqd's answer to " + e.step + ": " + printable(e.err.Error())
}

func (e *stepFailure) Unwrap() error { return e.err }

// acceptedSilence is how long nsqd may send nothing at all: two heartbeats, or the read timeout if that is less, but
// never below one and a half, which a healthy nsqd could reach. 0 means for ever.
func acceptedSilence(cfg *Config) time.Duration {
	interval := cmp.Or(cfg.HeartbeatInterval, defaultHeartbeat)
	if interval < 0 {
		return 0
	}
	silence := 2 * interval
	if cfg.ReadTimeout > 0 {
		silence = min(silence, cfg.ReadTimeout)
	}
	return max(silence, interval+interval/2)
}
