package soak

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest/internal/left"
)

const (
	topic   = "events"
	channel = "archive"

	msgTimeout        = 3 * time.Second
	heartbeatInterval = time.Second // the shortest that nsqd accepts; the longest silence is two of them
	shutdownTimeout   = 10 * time.Second

	// slack is what a bound in time is exceeded by on a busy machine.
	slack = 2 * time.Second
)

// numberLength is how many digits a body starts with.
const numberLength = 10

// body makes the body of a message: its number, and some bytes that follow from it.
func body(number int) []byte {
	size := mix(uint64(number)) % 400
	if number%5000 == 4999 {
		size = 200_000 // longer than any buffer on the way
	}
	b := make([]byte, 0, numberLength+int(size))
	b = fmt.Appendf(b, "%0*d", numberLength, number)
	return append(b, bytes.Repeat([]byte{byte('a' + number%26)}, int(size))...)
}

// numberOf reads the number of a body, -1 if it is none of ours.
func numberOf(b []byte) int {
	if len(b) < numberLength {
		return -1
	}
	n, err := strconv.Atoi(string(b[:numberLength]))
	if err != nil {
		return -1
	}
	return n
}

// mix makes a number look random.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xBF58476D1CE4E5B9
	x ^= x >> 27
	x *= 0x94D049BB133111EB
	return x ^ x>>31
}

// workerConfig says what a consumer is like; it travels to child processes as JSON.
type workerConfig struct {
	Name         string
	MaxInFlight  int
	Handlers     int
	Backoff      bool
	Lookupds     []string // HTTP addresses; empty: direct connections
	NSQDs        []string // addresses of direct connections
	ChangeEvery  time.Duration
	MaxInFlights []int  // for ChangeEvery, in turn
	Seed         uint64 // of what handlers do, together with the number
	Journal      string // path, of a child
	Verbose      bool
}

func (w workerConfig) config(t *tap) *nsq.Config {
	cfg := nsq.NewConfig()
	cfg.ClientID = w.Name
	cfg.Dial = t.dial
	cfg.MaxInFlight = w.MaxInFlight
	cfg.MaxAttempts = 0
	cfg.DefaultRequeueDelay = 50 * time.Millisecond
	cfg.MaxRequeueDelay = 500 * time.Millisecond
	cfg.MaxBackoffDuration = 0
	if w.Backoff {
		cfg.BackoffMultiplier = 5 * time.Millisecond
		cfg.MaxBackoffDuration = 50 * time.Millisecond
	}
	cfg.HeartbeatInterval = heartbeatInterval
	cfg.ReadTimeout = 3 * time.Second
	cfg.MsgTimeout = msgTimeout
	cfg.OutputBufferTimeout = 25 * time.Millisecond
	cfg.ReconnectInterval = 20 * time.Millisecond
	cfg.MaxReconnectInterval = 300 * time.Millisecond
	cfg.LookupdPollInterval = 100 * time.Millisecond
	cfg.LookupdPollTimeout = 2 * time.Second
	cfg.RDYRedistributeInterval = 500 * time.Millisecond
	cfg.RDYTurnIdle = 50 * time.Millisecond
	cfg.RDYTurnBusy = 200 * time.Millisecond
	cfg.ShutdownTimeout = shutdownTimeout
	return cfg
}

// worker is a consumer with its handlers and its tap.
type worker struct {
	workerConfig
	consumer *nsq.Consumer
	tap      *tap
	journal  journal
	done     chan struct{} // closed when the consumer is to stop
	wg       sync.WaitGroup
}

func startWorker(cfg workerConfig, j journal) (*worker, error) {
	w := &worker{workerConfig: cfg, journal: j, done: make(chan struct{})}
	w.tap = newTap(j, msgTimeout, cfg.MaxInFlight)
	var err error
	if w.consumer, err = nsq.NewConsumer(topic, channel, cfg.config(w.tap)); err != nil {
		return nil, err
	}
	w.consumer.SetLogger(nil, nsq.LogLevelError)
	if cfg.Verbose {
		w.consumer.SetLogger(&workerLog{name: cfg.Name}, nsq.LogLevelInfo)
	}
	w.consumer.AddConcurrentHandlers(nsq.HandlerFunc(w.handle), cfg.Handlers)
	if len(cfg.Lookupds) > 0 {
		if err := w.consumer.ConnectToNSQLookupds(cfg.Lookupds); err != nil {
			w.consumer.Stop()
			return nil, err
		}
	}
	for _, addr := range cfg.NSQDs {
		w.wg.Go(func() { w.connect(addr) })
	}
	w.wg.Go(w.sweep)
	w.wg.Go(w.tick)
	if cfg.ChangeEvery > 0 {
		w.wg.Go(w.changeMaxInFlight)
	}
	return w, nil
}

type workerLog struct{ name string }

func (l *workerLog) Output(_ int, line string) error {
	_, err := fmt.Fprintln(os.Stderr, time.Now().Format("15:04:05.000"), l.name, line)
	return err
}

// connect tries until the first connect has succeeded, which is for the program to do; later ones are the consumer's.
func (w *worker) connect(addr string) {
	for w.consumer.ConnectToNSQD(addr) != nil {
		if !w.wait(50 * time.Millisecond) {
			return
		}
	}
}

// wait returns false if the consumer is to stop before.
func (w *worker) wait(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-w.done:
		return false
	}
}

func (w *worker) sweep() {
	for w.wait(200 * time.Millisecond) {
		w.tap.sweep()
	}
}

func (w *worker) tick() {
	for w.wait(tickEvery) {
		w.tap.tick()
	}
}

func (w *worker) changeMaxInFlight() {
	for i := 0; w.wait(w.ChangeEvery); i++ {
		w.setMaxInFlight(w.MaxInFlights[i%len(w.MaxInFlights)])
	}
	w.setMaxInFlight(w.MaxInFlight)
}

func (w *worker) setMaxInFlight(n int) {
	w.tap.setLimit(n)
	w.consumer.ChangeMaxInFlight(n)
}

// stop stops the consumer and reports what is not as it should be.
func (w *worker) stop() {
	close(w.done)
	start := time.Now()
	w.consumer.Stop()
	select {
	case <-w.consumer.StopChan:
	case <-time.After(shutdownTimeout + slack):
		w.tap.report("StopChan has not closed %s after Stop", time.Since(start))
		return
	}
	took := time.Since(start)
	if n := w.tap.open(); n > 0 {
		w.tap.report("%d connections are open after StopChan", n)
	}
	if s := w.consumer.Status(); s.Running > 0 {
		w.tap.report("%d handlers run after StopChan", s.Running)
	}
	w.tap.sweep()
	w.wg.Wait()
	w.tap.mu.Lock()
	defer w.tap.mu.Unlock()
	stats, err := json.Marshal(w.tap.stats)
	if err != nil {
		panic(err)
	}
	w.journal.write(event{kind: eventStopped, at: time.Now().UnixNano(), text: fmt.Sprintf("stopped in %s: %s", took.Round(time.Millisecond), stats)})
}

// handle does with a message what its number says.
func (w *worker) handle(m *nsq.Message) error {
	d := w.tap.begin(m)
	if d.number < 0 || !bytes.Equal(m.Body, body(d.number)) {
		w.tap.report("the body of message %d is not what was published: %.40q", d.number, m.Body)
	}
	fate := mix(uint64(d.number)*2654435761+w.Seed) % 4000
	if m.Attempts > 2 {
		fate += 1000 // no trouble twice
	}
	switch {
	case fate < 40:
		w.tap.end(d, requeued)
		return errors.New("as planned")
	case fate < 60:
		w.tap.end(d, requeued)
		m.Requeue(0)
		return nil
	case fate < 80:
		w.tap.end(d, requeued)
		m.RequeueWithoutBackoff(200 * time.Millisecond)
		return nil
	case fate < 82:
		w.tap.end(d, requeued)
		panic("as planned")
	case fate < 83: // later than the message timeout
		time.Sleep(msgTimeout * 6 / 5)
	case fate < 84: // the same, in time
		for range 4 {
			time.Sleep(msgTimeout * 3 / 10)
			w.tap.touched(d)
			m.Touch()
		}
	case fate < 120:
		m.DisableAutoResponse()
		w.wg.Go(func() {
			time.Sleep(time.Duration(fate%20) * time.Millisecond)
			w.tap.end(d, finished)
			m.Finish()
		})
		return nil
	case fate < 700:
		time.Sleep(time.Duration(fate%4) * time.Millisecond)
	}
	w.tap.end(d, finished)
	return nil
}

// childEnv makes the test binary a consumer. Its value is a workerConfig.
const childEnv = "NSQTEST_SOAK_CONSUMER"

// runChild is a consumer in a process of its own, from its start to the end of the standard input.
func runChild(cfg workerConfig) error {
	j, err := openFileJournal(cfg.Journal)
	if err != nil {
		return err
	}
	w, err := startWorker(cfg, j)
	if err != nil {
		return err
	}
	if _, err := os.Stdin.Read(make([]byte, 1)); err == nil {
		return errors.New("the standard input is not for reading")
	}
	w.stop()
	if left := left.Goroutines(slack); len(left) > 0 {
		w.tap.report("%d goroutines of the library are left:\n%s", len(left), strings.Join(left, "\n\n"))
	}
	return nil
}

// newSeededRand is a source of its own for each thing that is random, so that they don't disturb each other.
func newSeededRand(seed uint64, lane string) *rand.Rand {
	h := seed
	for _, c := range []byte(lane) {
		h = mix(h ^ uint64(c))
	}
	return rand.New(rand.NewPCG(seed, h))
}

// sleep waits for d. It returns false if ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
