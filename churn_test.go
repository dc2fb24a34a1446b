package nsq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// churn is a consumer, and connections made by hand, whose every public method is called from many goroutines while
// nsqds and nsqlookupds come and go.
type churn struct {
	t        *testing.T
	cluster  *fakeCluster
	addrs    []string
	lookupds *fakeLookupds
	lookups  []string
	config   *Config // the user's, who goes on using it
	r        *Consumer
	answers  sync.WaitGroup // goroutines that answer messages
}

// What the methods of each type are called with. TestTheChurnCallsEveryPublicMethod fails for one that is missing.
var (
	churnConsumer = map[string]func(x *churn, rnd *rand.Rand){
		"AddHandler": func(x *churn, _ *rand.Rand) {
			assert.PanicsWithValue(x.t, "already connected", func() { x.r.AddHandler(HandlerFunc(finishAll)) })
		},
		"AddConcurrentHandlers": func(x *churn, _ *rand.Rand) {
			assert.PanicsWithValue(x.t, "already connected", func() { x.r.AddConcurrentHandlers(HandlerFunc(finishAll), 3) })
		},
		"ChangeMaxInFlight":        func(x *churn, rnd *rand.Rand) { x.r.ChangeMaxInFlight(rnd.IntN(12) - 1) },
		"ConnectToNSQD":            func(x *churn, rnd *rand.Rand) { x.known(x.r.ConnectToNSQD(pick(rnd, x.addrs...))) },
		"ConnectToNSQDs":           func(x *churn, _ *rand.Rand) { x.known(x.r.ConnectToNSQDs(x.addrs)) },
		"ConnectToNSQLookupd":      func(x *churn, rnd *rand.Rand) { x.known(x.r.ConnectToNSQLookupd(pick(rnd, x.lookups...))) },
		"ConnectToNSQLookupds":     func(x *churn, _ *rand.Rand) { x.known(x.r.ConnectToNSQLookupds(x.lookups)) },
		"DisconnectFromNSQD":       func(x *churn, rnd *rand.Rand) { x.known(x.r.DisconnectFromNSQD(pick(rnd, x.addrs...))) },
		"DisconnectFromNSQLookupd": func(x *churn, rnd *rand.Rand) { x.known(x.r.DisconnectFromNSQLookupd(pick(rnd, x.lookups...))) },
		"IsStarved":                func(x *churn, _ *rand.Rand) { x.r.IsStarved() },
		"SetBehaviorDelegate":      func(x *churn, _ *rand.Rand) { x.r.SetBehaviorDelegate(churnFilter{}) },
		"SetLogger":                func(x *churn, rnd *rand.Rand) { x.r.SetLogger(churnLogger{x.r}, LogLevel(rnd.IntN(4))) },
		"SetLoggerForLevel":        func(x *churn, rnd *rand.Rand) { x.r.SetLoggerForLevel(churnLogger{x.r}, LogLevel(rnd.IntN(4))) },
		"SetLoggerLevel":           func(x *churn, rnd *rand.Rand) { x.r.SetLoggerLevel(LogLevel(rnd.IntN(4))) },
		"SetLookupdHttpClient":     func(x *churn, _ *rand.Rand) { x.r.SetLookupdHttpClient(x.lookupds.client()) },
		"Stats":                    func(x *churn, _ *rand.Rand) { x.r.Stats() },
		"Status":                   func(x *churn, _ *rand.Rand) { x.r.Status() },
		"Stop":                     func(x *churn, _ *rand.Rand) { x.r.Stop() }, // at the end, and so Shutdown
		"Shutdown": func(x *churn, _ *rand.Rand) {
			ctx, cancel := context.WithTimeout(context.Background(), churnShutdown)
			defer cancel()
			assert.NoError(x.t, x.r.Shutdown(ctx))
		},
	}
	churnMessage = map[string]func(m *Message){
		"DisableAutoResponse":    (*Message).DisableAutoResponse,
		"Finish":                 (*Message).Finish,
		"HasResponded":           func(m *Message) { m.HasResponded() },
		"IsAutoResponseDisabled": func(m *Message) { m.IsAutoResponseDisabled() },
		"Requeue":                func(m *Message) { m.Requeue(0) },
		"RequeueWithoutBackoff":  func(m *Message) { m.RequeueWithoutBackoff(-1) },
		"Touch":                  (*Message).Touch,
		"WriteTo":                func(m *Message) { _, _ = m.WriteTo(io.Discard) },
	}
	churnConn = map[string]func(x *churn, rnd *rand.Rand, c *Conn){
		"Connect": func(x *churn, _ *rand.Rand, c *Conn) {
			_, err := c.Connect()
			x.known(err)
		},
		"Close":             func(x *churn, _ *rand.Rand, c *Conn) { assert.NoError(x.t, c.Close()) },
		"Flush":             func(x *churn, _ *rand.Rand, c *Conn) { x.known(c.Flush()) },
		"IsClosing":         func(_ *churn, _ *rand.Rand, c *Conn) { c.IsClosing() },
		"LastMessageTime":   func(_ *churn, _ *rand.Rand, c *Conn) { c.LastMessageTime() },
		"LastRDY":           func(_ *churn, _ *rand.Rand, c *Conn) { c.LastRDY() },
		"LastRdyTime":       func(_ *churn, _ *rand.Rand, c *Conn) { c.LastRdyTime() },
		"MaxRDY":            func(_ *churn, _ *rand.Rand, c *Conn) { c.MaxRDY() },
		"RDY":               func(_ *churn, _ *rand.Rand, c *Conn) { c.RDY() },
		"RemoteAddr":        func(_ *churn, _ *rand.Rand, c *Conn) { c.RemoteAddr() },
		"SetLogger":         func(_ *churn, rnd *rand.Rand, c *Conn) { c.SetLogger(nil, LogLevel(rnd.IntN(4)), "") },
		"SetLoggerForLevel": func(_ *churn, rnd *rand.Rand, c *Conn) { c.SetLoggerForLevel(nil, LogLevel(rnd.IntN(4)), "%s") },
		"SetLoggerLevel":    func(_ *churn, rnd *rand.Rand, c *Conn) { c.SetLoggerLevel(LogLevel(rnd.IntN(4))) },
		"SetRDY":            func(_ *churn, rnd *rand.Rand, c *Conn) { c.SetRDY(rnd.Int64N(3)) },
		"String":            func(_ *churn, _ *rand.Rand, c *Conn) { _ = c.String() },
		"Read": func(x *churn, _ *rand.Rand, c *Conn) {
			_, err := c.Read(make([]byte, 1))
			x.known(err)
		},
		"Write": func(x *churn, _ *rand.Rand, c *Conn) {
			_, err := c.Write([]byte("NOP\n"))
			x.known(err)
		},
		"WriteCommand": func(x *churn, rnd *rand.Rand, c *Conn) {
			x.known(c.WriteCommand(pick(rnd, Ready(2), Nop(), Nop(), StartClose())))
		},
	}
)

const (
	churnHeartbeat = time.Second
	churnRead      = 2 * time.Second // for each answer, and of silence
	churnWrite     = time.Second
	churnShutdown  = 20 * time.Second
)

// churnLimits say how long calls may take; those that are not here take no time, whatever peers and handlers do.
var churnLimits = map[string]time.Duration{
	"Consumer.ConnectToNSQD":        time.Second + 2*churnRead, // the dial, IDENTIFY, SUB
	"Consumer.ConnectToNSQDs":       time.Second + 2*churnRead,
	"Consumer.ConnectToNSQLookupd":  firstLookupWait,
	"Consumer.ConnectToNSQLookupds": firstLookupWait,
	"Consumer.Shutdown":             churnShutdown,
	"Conn.Connect":                  time.Second + 2*churnRead,
	"Conn.Flush":                    2 * churnWrite, // behind what is being written
	"Conn.Write":                    2 * churnWrite,
	"Conn.WriteCommand":             2 * churnWrite,
	"Conn.Read":                     time.Hour, // until something comes, or the connection ends
}

// churnFilter takes its time, and lets all pass.
type churnFilter struct{}

func (churnFilter) Filter(addrs []string) []string {
	time.Sleep(time.Millisecond)
	return addrs
}

// churnLogger calls the consumer that logs.
type churnLogger struct{ r *Consumer }

func (l churnLogger) Output(int, string) error {
	l.r.IsStarved()
	return nil
}

// TestTheChurnCallsEveryPublicMethod fails when a method is added that the churn does not call.
func TestTheChurnCallsEveryPublicMethod(t *testing.T) {
	for of, called := range map[reflect.Type][]string{
		reflect.TypeFor[*Consumer](): slices.Sorted(maps.Keys(churnConsumer)),
		reflect.TypeFor[*Message]():  slices.Sorted(maps.Keys(churnMessage)),
		reflect.TypeFor[*Conn]():     slices.Sorted(maps.Keys(churnConn)),
	} {
		var methods []string
		for m := range of.NumMethod() {
			methods = append(methods, of.Method(m).Name)
		}
		require.Equal(t, methods, called, "of %s", of)
	}
}

// Promises 17, 18 and 19: whoever calls whatever at whatever time, while nsqds and nsqlookupds come and go: no panic, no
// race, each call back within its time, and Stop ends all.
func TestChurn(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			watch := churnWatchdog(time.Minute)
			defer watch.Stop()
			synctest.Test(t, func(t *testing.T) { newChurn(t).run(seed) })
		})
	}
}

// churnWatchdog ends the process when a bubble hangs: a goroutine that waits for a mutex stops the bubble's clock, so
// nothing inside would notice.
func churnWatchdog(patience time.Duration) *time.Timer {
	return time.AfterFunc(patience, func() {
		stacks := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "the churn hangs:\n%s\n", stacks[:runtime.Stack(stacks, true)])
		panic("the churn hangs")
	})
}

func newChurn(t *testing.T) *churn {
	x := &churn{t: t, addrs: []string{"a:4150", "b:4150", "c:4150"}, lookups: []string{"l1:4161", "l2:4161"}}
	x.cluster = newFakeCluster(t, x.addrs...)
	x.lookupds = newFakeLookupds(t, x.lookups...)
	x.lookupds.at("l1:4161").list(x.addrs[:2]...)
	x.lookupds.at("l2:4161").list(x.addrs[1:]...)
	for _, addr := range x.addrs {
		n := x.cluster.nsqd(addr)
		n.flood(2 * time.Millisecond)
		n.set(func(b *fakeBehaviour) { b.msgTimeout, b.stragglers = time.Second, 2 })
	}
	x.r = newTestConsumer(t, x.cluster, func(cfg *Config) {
		cfg.LookupdPollInterval, cfg.VanishTimeout = 100*time.Millisecond, 200*time.Millisecond
		cfg.ReconnectInterval, cfg.MaxReconnectInterval = 5*time.Millisecond, 50*time.Millisecond
		cfg.HeartbeatInterval, cfg.ReadTimeout, cfg.WriteTimeout = churnHeartbeat, churnRead, churnWrite
		cfg.BackoffMultiplier, cfg.MaxBackoffDuration = time.Millisecond, 4*time.Millisecond
		cfg.DefaultRequeueDelay = time.Millisecond
		cfg.MaxInFlight = 8
		x.config = cfg
	})
	x.r.SetLookupdHttpClient(x.lookupds.client())
	x.r.AddConcurrentHandlers(HandlerFunc(x.handle), 5)
	return x
}

// handle calls all that a message has, from goroutines of which some outlive the handler.
func (x *churn) handle(m *Message) error {
	for i, name := range slices.Sorted(maps.Keys(churnMessage)) {
		if name == "DisableAutoResponse" && m.ID[15]%4 != 0 {
			continue
		}
		x.answers.Go(func() {
			time.Sleep(time.Duration(int(m.ID[15])+i) % 7 * 400 * time.Microsecond)
			churnMessage[name](m)
		})
	}
	switch m.ID[15] {
	case '0', '1', '2':
		time.Sleep(2 * time.Millisecond)
	case '3':
		panic("boom")
	case '4':
		runtime.Goexit()
	case '5':
		return errors.New("no good")
	}
	return nil
}

// known fails the test for an error that nobody would expect.
func (x *churn) known(err error) {
	if err == nil {
		return
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			x.known(err)
		}
		return
	}
	for _, known := range []error{
		ErrAlreadyConnected, ErrNotConnected, ErrClosing, ErrConnectionLost, ErrHeartbeatTimeout, errConsumerStopped,
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe,
		os.ErrDeadlineExceeded, context.DeadlineExceeded,
	} {
		if errors.Is(err, known) {
			return
		}
	}
	if errors.As(err, new(*TimeoutError)) || strings.Contains(err.Error(), "only remaining") || strings.Contains(err.Error(), "closed") {
		return
	}
	assert.NoError(x.t, err)
}

// within makes a call and fails the test if it takes too long.
func (x *churn) within(name string, call func()) {
	start := time.Now()
	call()
	if took := time.Since(start); took > churnLimits[name] {
		assert.Fail(x.t, "a call takes too long", "%s took %s", name, took)
	}
}

func (x *churn) run(seed uint64) {
	var calls sync.WaitGroup
	stop := make(chan struct{})
	again := func(n uint64, pause time.Duration, do func(rnd *rand.Rand)) {
		calls.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, n))
			for !isClosed(stop) {
				time.Sleep(time.Duration(rnd.Int64N(int64(pause))))
				do(rnd)
			}
		})
	}
	require.NoError(x.t, x.r.ConnectToNSQDs(x.addrs))
	for i, name := range slices.Sorted(maps.Keys(churnConsumer)) {
		if name != "Stop" && name != "Shutdown" {
			again(uint64(i), 40*time.Millisecond, func(rnd *rand.Rand) {
				x.within("Consumer."+name, func() { churnConsumer[name](x, rnd) })
			})
		}
	}
	for i := range uint64(2) {
		again(100+i, 100*time.Millisecond, func(rnd *rand.Rand) { x.connByHand(rnd) })
		again(110+i, 40*time.Millisecond, func(rnd *rand.Rand) { x.trouble(rnd) })
	}
	again(120, 40*time.Millisecond, func(rnd *rand.Rand) { // the consumer has its own copy
		assert.NoError(x.t, x.config.Set("max_in_flight", 1+rnd.IntN(10)))
		assert.NoError(x.t, x.config.Validate())
		r, err := NewConsumer("t", "c", x.config)
		assert.NoError(x.t, err)
		r.SetLogger(nil, LogLevelInfo)
		r.Stop()
		<-r.StopChan
	})

	time.Sleep(time.Duration(300+rand.New(rand.NewPCG(seed, 999)).IntN(200)) * time.Millisecond)
	for range 3 {
		calls.Go(func() { x.within("Consumer.Stop", func() { churnConsumer["Stop"](x, nil) }) })
		calls.Go(func() { x.within("Consumer.Shutdown", func() { churnConsumer["Shutdown"](x, nil) }) })
	}
	select {
	case <-x.r.StopChan:
	case <-time.After(churnShutdown):
		require.Fail(x.t, "it does not stop")
	}
	time.Sleep(50 * time.Millisecond) // calls behind the stop
	close(stop)
	calls.Wait()
	x.answers.Wait()
	for _, addr := range x.addrs {
		n := x.cluster.nsqd(addr)
		n.stopFlood()
		n.startReading()
	}
	synctest.Wait()
	require.Zero(x.t, x.cluster.openConns())
	require.Zero(x.t, x.r.Stats().Connections)
	require.Zero(x.t, x.r.Status().Running)
	require.Zero(x.t, x.r.Status().InFlight)
	ours := map[int]bool{}
	for _, e := range x.cluster.snapshot(byKind(entryCommand), byLine("SUB t c")) {
		ours[e.Conn] = true
	}
	for _, e := range x.cluster.snapshot(byKind(entryError)) {
		if ours[e.Conn] {
			require.Regexp(x.t, "^E_(FIN|REQ|TOUCH)_FAILED", e.Line, "nsqd was told nonsense")
		}
	}
}

// connByHand makes a connection and has many goroutines call all its methods, while others answer its messages.
func (x *churn) connByHand(rnd *rand.Rand) {
	cfg := NewConfig()
	cfg.Dial = x.cluster.Dial
	cfg.HeartbeatInterval, cfg.ReadTimeout, cfg.WriteTimeout = churnHeartbeat, churnRead, churnWrite
	d := &churnDelegate{x: x}
	c := NewConn(pick(rnd, x.addrs...), cfg, d)
	c.SetLogger(nil, LogLevelInfo, "")
	if rnd.IntN(4) > 0 {
		_, err := c.Connect()
		x.known(err)
		if err == nil {
			x.known(c.WriteCommand(Subscribe("t", "by-hand")))
			x.known(c.WriteCommand(Ready(5)))
		}
	}
	var calls sync.WaitGroup
	for _, name := range slices.Sorted(maps.Keys(churnConn)) {
		if name == "Read" && rnd.IntN(4) > 0 || name == "Close" { // who reads along ends the connection's life
			continue
		}
		rnd := rand.New(rand.NewPCG(rnd.Uint64(), 0))
		calls.Go(func() {
			for range 3 {
				time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
				x.within("Conn."+name, func() { churnConn[name](x, rnd, c) })
			}
		})
	}
	time.Sleep(time.Duration(rnd.IntN(6000)) * time.Microsecond)
	for range 2 {
		calls.Go(func() { x.within("Conn.Close", func() { churnConn["Close"](x, nil, c) }) })
	}
	calls.Wait()
}

// churnDelegate answers messages, and calls the connection that calls it.
type churnDelegate struct {
	connEvents
	x *churn
}

func (d *churnDelegate) OnMessage(c *Conn, m *Message) {
	c.RDY()
	for _, name := range slices.Sorted(maps.Keys(churnMessage)) {
		d.x.answers.Go(func() { churnMessage[name](m) })
	}
}

func (d *churnDelegate) OnIOError(c *Conn, _ error) { _ = c.Close() }

// trouble does something to an nsqd or an nsqlookupd.
func (x *churn) trouble(rnd *rand.Rand) {
	n, l := x.cluster.nsqd(pick(rnd, x.addrs...)), x.lookupds.at(pick(rnd, x.lookups...))
	switch rnd.IntN(12) {
	case 0:
		n.down()
	case 1, 2, 3:
		n.up()
	case 4:
		n.dropAll()
	case 5:
		n.closeAll()
	case 6:
		n.setReach(pick(rnd, reachHangs, reachSilent, reachUp))
	case 7:
		n.stopReadingFor(time.Duration(rnd.IntN(100)) * time.Millisecond)
	case 8:
		if c := n.conn(); c != nil {
			pick(rnd, c.closeMidFrame, c.closeWrite, c.sendHeartbeat, func() { c.sendError("E_FIN_FAILED") })()
		}
	case 9:
		l.list(x.addrs[rnd.IntN(3):]...)
	case 10:
		l.broken()
	case 11:
		n.expire()
	}
}
