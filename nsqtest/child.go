package nsqtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/nsqio/nsq/nsqd"
)

// childEnv makes a program that imports this package an nsqd. Its value is nsqd's options as JSON.
const childEnv = "NSQTEST_NSQD"

// readyPrefix begins the line that tells the parent where nsqd listens. Other packages may have written lines of their own.
const readyPrefix = "nsqtest: nsqd listens: "

// childAddrs is the rest of that line.
type childAddrs struct {
	TCP  string
	HTTP string
}

// init takes over in the process that NSQDProcess starts, before main and before the packages that import this one.
func init() {
	config, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := runChild(config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// runChild is nsqd from start to end, which comes with the end of the standard input or a signal.
func runChild(config string) error {
	opts := nsqd.NewOptions()
	if err := json.Unmarshal([]byte(config), opts); err != nil {
		return fmt.Errorf("nsqtest: %s: %w", childEnv, err)
	}
	daemon, err := openNSQD(opts)
	if err != nil {
		return err
	}
	r := startRun(daemon, nil, newLogSink(nil))

	line, err := json.Marshal(childAddrs{TCP: daemon.RealTCPAddr().String(), HTTP: daemon.RealHTTPAddr().String()})
	if err != nil {
		return err
	}
	fmt.Println(readyPrefix + string(line))
	awaitEnd()
	return r.stop(childStopTimeout)
}

func awaitEnd() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, os.Interrupt, syscall.SIGTERM)
	go func() {
		io.Copy(io.Discard, os.Stdin)
		end <- os.Interrupt
	}()
	<-end
}

// tailLines is how much of a child's output is kept for an error.
const tailLines = 20

// childOutput takes in what a child writes: the ready line, and the log.
type childOutput struct {
	log   *logSink
	ready chan childAddrs // size 1

	mu      sync.Mutex // guards the fields below
	partial []byte     // a line without its end
	last    []string   // lines
}

func newChildOutput(log *logSink) *childOutput {
	return &childOutput{log: log, ready: make(chan childAddrs, 1)}
}

// Write takes any part of the output; os/exec calls it from one goroutine for both streams.
func (o *childOutput) Write(data []byte) (int, error) {
	for _, line := range o.split(data) {
		o.take(line)
	}
	return len(data), nil
}

// split returns the lines that data completes.
func (o *childOutput) split(data []byte) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.partial = append(o.partial, data...)
	var lines []string
	for {
		line, rest, found := bytes.Cut(o.partial, []byte("\n"))
		if !found {
			return lines
		}
		lines = append(lines, string(line))
		o.partial = rest
	}
}

func (o *childOutput) take(line string) {
	text, isReady := strings.CutPrefix(line, readyPrefix)
	var addrs childAddrs
	if isReady && json.Unmarshal([]byte(text), &addrs) == nil {
		select {
		case o.ready <- addrs:
		default: // it comes once; another is not ours
		}
		return
	}
	o.mu.Lock()
	o.last = append(o.last, line)
	o.last = o.last[max(0, len(o.last)-tailLines):]
	o.mu.Unlock()
	o.log.Output(0, line)
}

func (o *childOutput) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.Join(o.last, "\n")
}
