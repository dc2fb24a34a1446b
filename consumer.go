package nsq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Consumer reads one channel of a topic from any number of nsqds and has handlers work on the messages.
//
// Make one with NewConsumer, add handlers, then connect it to nsqlookupds or nsqds. It runs until Stop or Shutdown; StopChan is closed
// when nothing of it is left. All methods may be called at any time from any goroutine, except where they say so.
type Consumer struct {
	// StopChan is closed when the consumer has stopped: no goroutine, timer or socket of it is left then, but for
	// handlers that did not return in time. Nothing is ever sent on it.
	StopChan chan int

	topic   string
	channel string
	config  *Config // our own copy, never changed
	log     *loggers

	inbox       *inbox
	handlers    sync.WaitGroup // handlerLoop
	givenUp     atomic.Uint64
	suppressed  atomic.Uint64 // answers that were not sent, some of them after the end of their connection
	abandoned   atomic.Int64  // messages left unanswered by a stop that took too long
	failedHere  recentIDs
	failureGate sharedGate
	givenUpGate sharedGate
	lateGate    sharedGate
	expiredGate sharedGate
	leftOutGate sharedGate
	wrappedGate sharedGate

	events        chan rdyEvent // to rdyLoop, which never waits for those who send
	pokes         chan struct{} // size 1: rdyLoop shall look at the connections
	rdyStop       chan struct{} // closed to end rdyLoop
	rdyDone       chan struct{} // closed when it has ended
	backoffActive atomic.Bool   // written by rdyLoop: every answer matters to it
	maxInFlight   atomic.Int64  // as the user set it last

	ctx      context.Context // ends when Stop begins: dials, lookups and waits are over
	cancel   context.CancelCauseFunc
	force    context.Context // ends when stopping has taken too long
	forceNow context.CancelCauseFunc
	serving  sync.WaitGroup // goroutines of nodes; added to under mu while not stopping

	lookups lookups

	mu          sync.Mutex // guards the fields below; never held while calling out or waiting
	workers     []*worker
	poolErr     error // what was wrong with AddHandler
	connected   bool  // a Connect call got past its checks: handlers are fixed
	started     bool  // rdyLoop and handlers run
	stopping    bool
	stopLimited bool             // Stop was called, so that Config.ShutdownTimeout holds
	stopErr     error            // what was left when it had stopped
	nodes       map[string]*node // by address as configured or discovered
	leaving     map[*Conn]bool   // connections of nodes that were dropped, until they have ended
	past        connCounts       // of connections that have ended
	backoff     backoffStatus    // written by rdyLoop
}

// NewConsumer returns a consumer of a channel of a topic. It does nothing before it is connected.
//
// Errors: the config's, if it is nil, not from NewConfig, or not valid; "invalid topic name"; "invalid channel name".
// The config is copied, so later changes of it have no effect.
func NewConsumer(topic string, channel string, config *Config) (*Consumer, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	if !IsValidTopicName(topic) {
		return nil, errors.New("invalid topic name")
	}
	if !IsValidChannelName(channel) {
		return nil, errors.New("invalid channel name")
	}
	r := &Consumer{
		StopChan:    make(chan int),
		topic:       topic,
		channel:     channel,
		config:      config.clone(),
		log:         consumerLoggers(nextInstance(), topic, channel),
		inbox:       newInbox(),
		failureGate: sharedGate{gate: logGate{burst: 60, interval: 10 * time.Second}},
		givenUpGate: sharedGate{gate: logGate{burst: 60, interval: 10 * time.Second}},
		lateGate:    sharedGate{gate: logGate{burst: 5, interval: time.Minute}},
		expiredGate: sharedGate{gate: logGate{burst: 5, interval: time.Minute}},
		leftOutGate: sharedGate{gate: logGate{interval: 10 * time.Minute}},
		wrappedGate: sharedGate{gate: logGate{interval: time.Minute}},
		events:      make(chan rdyEvent, 64),
		pokes:       make(chan struct{}, 1),
		rdyStop:     make(chan struct{}),
		rdyDone:     make(chan struct{}),
		nodes:       make(map[string]*node),
		leaving:     make(map[*Conn]bool),
	}
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	r.force, r.forceNow = context.WithCancelCause(context.Background())
	r.maxInFlight.Store(int64(r.config.MaxInFlight))
	r.lookups.init(r.config)
	return r, nil
}

// AddHandler adds a handler that gets one message at a time. See AddConcurrentHandlers.
func (r *Consumer) AddHandler(handler Handler) { r.AddConcurrentHandlers(handler, 1) }

// AddConcurrentHandlers adds a handler that is called from so many goroutines at a time. Several handlers share the
// messages; each message goes to one of them. Messages in flight are limited by Config.MaxInFlight, whatever the
// concurrency.
//
// It panics with "already connected" once the consumer was connected. A nil handler and a concurrency below 1 are the
// error of the next Connect call.
func (r *Consumer) AddConcurrentHandlers(handler Handler, concurrency int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.connected {
		panic("already connected")
	}
	switch {
	case isNil(handler):
		r.poolErr = errors.New("nsq: AddHandler with a nil handler")
	case concurrency < 1:
		r.poolErr = fmt.Errorf("nsq: AddConcurrentHandlers with a concurrency of %d, must be 1 at least", concurrency)
	default:
		for range concurrency {
			r.workers = append(r.workers, &worker{handler: handler})
		}
	}
}

// readyLocked makes the checks that all Connect calls begin with.
func (r *Consumer) readyLocked() error {
	switch {
	case r.stopping:
		return errConsumerStopped
	case r.poolErr != nil:
		return r.poolErr
	case len(r.workers) == 0:
		return errNoHandlers
	}
	return nil
}

func (r *Consumer) startLocked() {
	r.connected = true
	if r.started {
		return
	}
	r.started = true
	for _, w := range r.workers {
		r.handlers.Go(func() { r.handlerLoop(w) })
	}
	go r.rdyLoop(len(r.workers))
}

// ChangeMaxInFlight changes how many messages may be in flight over all connections together. It acts at once in every
// state, but does not wait for RDY to be written. 0 pauses the consumer until it is called again; a negative number is
// taken as 0.
func (r *Consumer) ChangeMaxInFlight(maxInFlight int) {
	n := int64(max(maxInFlight, 0))
	if r.maxInFlight.Swap(n) != n {
		r.changed()
	}
}

// IsStarved reports whether a connection has nearly as many messages in flight as its RDY allows, 85 % of them: a
// handler that collects messages should not wait for more then.
func (r *Consumer) IsStarved() bool {
	for _, c := range r.conns() {
		c.mu.Lock()
		unanswered, rdy := c.table.live, c.wantRDY
		c.mu.Unlock()
		if unanswered > 0 && !c.IsClosing() && float64(unanswered) >= 0.85*float64(rdy) {
			return true
		}
	}
	return false
}

// conns returns the connections that are up, sorted by address.
func (r *Consumer) conns() []*Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	var conns []*Conn
	for _, addr := range slices.Sorted(maps.Keys(r.nodes)) {
		if c := r.nodes[addr].conn; c != nil {
			conns = append(conns, c)
		}
	}
	return conns
}

// SetLogger sends all log lines of the consumer and its connections to l, from a level on. A nil logger turns logging
// off. The default is standard error from LogLevelInfo on.
func (r *Consumer) SetLogger(l logger, lvl LogLevel) { r.log.set(l, lvl) }

// SetLoggerForLevel sends the log lines of one level to l.
func (r *Consumer) SetLoggerForLevel(l logger, lvl LogLevel) { r.log.setForLevel(l, lvl) }

// SetLoggerLevel sets the level from which on lines are logged.
func (r *Consumer) SetLoggerLevel(lvl LogLevel) { r.log.setLevel(lvl) }

// SetBehaviorDelegate takes an implementation of DiscoveryFilter, to be set before connecting. It panics with anything
// else.
func (r *Consumer) SetBehaviorDelegate(cb interface{}) {
	f, ok := cb.(DiscoveryFilter)
	if !ok {
		panic("behavior delegate does not have any recognized methods")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lookups.filter = f
}

// SetLookupdHttpClient has nsqlookupds queried by this client in place of the consumer's own, whose timeouts are
// Config.LookupdPollTimeout. Set it before connecting; nil brings back the own one.
func (r *Consumer) SetLookupdHttpClient(httpclient *http.Client) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lookups.setClient(httpclient)
}

// ---- what connections tell their consumer; see connOwner

func (r *Consumer) received(c *Conn, ms *arrivals) {
	if !c.IsClosing() {
		r.inbox.put(ms)
		return
	}
	for i := range ms.messages { // stragglers after CLS
		if m := &ms.messages[i]; m.state.drop() {
			c.giveBack(m)
		}
	}
}

// concerns: a FIN can change RDY only in backoff.
func (r *Consumer) concerns(a answer) bool { return !a.finish || r.backoffActive.Load() }

// decide sends an answer the long way round, through rdyLoop, if it can change RDY.
func (r *Consumer) decide(c *Conn, m *Message, a answer) bool {
	if !a.finish {
		r.failedHere.add(m.ID)
	}
	if failure := !a.finish && a.backoff; failure && r.config.MaxBackoffDuration == 0 {
		return false
	} else if !failure && !r.backoffActive.Load() {
		return false
	}
	select {
	case r.events <- rdyEvent{conn: c, message: m, answer: a}:
		return true
	case <-r.rdyDone:
		return false
	}
}

func (r *Consumer) ranInVain(ids []MessageID) {
	for _, id := range ids {
		r.failedHere.add(id)
	}
}

func (r *Consumer) response(c *Conn, data []byte) {
	switch string(data) {
	case closeWait:
		c.log.logf(LogLevelInfo, "received CLOSE_WAIT from nsqd")
	default:
		c.log.logf(LogLevelDebug, "response: %.64q", withoutSecret(string(data), r.config.AuthSecret))
	}
}

func (r *Consumer) heartbeat(*Conn) {}

// changed has rdyLoop look at the connections. It never blocks.
func (r *Consumer) changed() {
	select {
	case r.pokes <- struct{}{}:
	default: // it will look anyway
	}
}

func (r *Consumer) failed(c *Conn, err error, expected bool) {
	if saidByNSQD(err) {
		return // by protocolError
	}
	lvl := LogLevelWarning
	if expected {
		lvl = LogLevelInfo
	}
	c.log.logf(lvl, "IO error - %s", err)
}

// saidByNSQD tells whether err is an error frame that ended the connection.
func saidByNSQD(err error) bool {
	_, ok := err.(*ProtocolError)
	return ok
}

// protocolError logs what nsqd complains of. Late answers come in swarms, when handlers are too slow for the message
// timeout, so they are logged once in a while with their number.
func (r *Consumer) protocolError(c *Conn, err *ProtocolError, _ []byte) {
	switch {
	case err.Code == "E_AUTH_FAILED", err.Code == "E_UNAUTHORIZED": // what was granted has run out; the next AUTH will tell
		c.log.logf(LogLevelWarning, "protocol error - %s", err)
		return
	case err.Fatal():
		c.log.logf(LogLevelError, "protocol error - %s", err)
		return
	}
	if ok, more := r.lateGate.allow(time.Now()); ok {
		c.log.logf(LogLevelError, "protocol error - %s%s", err, alsoSuppressed(more))
	}
}

func (r *Consumer) lateAnswer(c *Conn, m *Message, gone bool) {
	r.suppressed.Add(1)
	if gone { // its loss was logged
		c.log.logf(LogLevelDebug, "answer to msg %s dropped, the connection is gone", m.ID[:])
		return
	}
	if ok, more := r.lateGate.allow(time.Now()); ok {
		c.log.logf(LogLevelWarning, "answer to msg %s came too late, it is nsqd's to deliver again%s",
			m.ID[:], alsoSuppressed(more))
	}
}

func alsoSuppressed(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" (and %d more like this)", n)
}

// sharedGate is a logGate for use by several goroutines.
type sharedGate struct {
	mu   sync.Mutex // guards gate
	gate logGate
}

func (g *sharedGate) allow(now time.Time) (bool, int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.gate.allow(now)
}
