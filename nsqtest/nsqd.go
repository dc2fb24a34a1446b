package nsqtest

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/nsqio/nsq/nsqd"
)

// ErrClosed is returned by Restart after Close.
var ErrClosed = errors.New("nsqtest: closed")

// NSQD is an nsqd inside this process. Its methods may be called from several goroutines, but Restart only from one at a time.
type NSQD struct {
	Node

	opts    NSQDOptions // with the addresses and the directory in use
	id      int64
	tempDir string // removed by Close; may be empty

	mu     sync.Mutex // guards the fields below
	run    *run       // the current or last run
	closed bool
}

// StartNSQD starts an nsqd that is stopped when the test ends; a failure ends the test. At most one NSQDOptions may be given.
// nsqd answers requests once StartNSQD returns.
func StartNSQD(tb TB, opts ...NSQDOptions) *NSQD {
	tb.Helper()
	o := optional(opts)
	if o.DataPath == "" {
		o.DataPath = tb.TempDir()
	}
	n, err := NewNSQD(o)
	if err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	closeAfter(tb, "nsqd", n.Close)
	return n
}

// optional returns the one value, or the zero value. More than one is a mistake in the caller's code.
func optional[T any](values []T) T {
	switch len(values) {
	case 0:
		var zero T
		return zero
	case 1:
		return values[0]
	default:
		panic("nsqtest: more than one set of options")
	}
}

// NewNSQD starts an nsqd, which runs until Stop or Close. It answers requests once NewNSQD returns.
func NewNSQD(opts NSQDOptions) (*NSQD, error) {
	n := &NSQD{opts: opts, id: nextNodeID()}
	var err error
	if n.tempDir, err = prepare(&n.opts); err != nil {
		return nil, err
	}
	if err := n.start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(n.tempDir))
	}
	return n, nil
}

// prepare fills in what must stay the same over restarts: addresses and directory. It returns the directory if it made it.
func prepare(o *NSQDOptions) (tempDir string, err error) {
	if o.TCPAddress, err = addrOr(o.TCPAddress); err != nil {
		return "", err
	}
	if o.HTTPAddress, err = addrOr(o.HTTPAddress); err != nil {
		return "", err
	}
	if o.DataPath != "" {
		return "", nil
	}
	tempDir, err = os.MkdirTemp("", "nsqtest-")
	if err != nil {
		return "", fmt.Errorf("nsqtest: %w", err)
	}
	o.DataPath = tempDir
	return tempDir, nil
}

func (n *NSQD) start() error {
	var r *run
	err := startOn([]string{n.opts.TCPAddress, n.opts.HTTPAddress}, func() (err error) {
		r, err = n.open()
		return err
	})
	if err != nil {
		return fmt.Errorf("nsqtest: starting nsqd: %w", err)
	}
	n.mu.Lock()
	n.run = r
	n.mu.Unlock()
	// Until it answers, Exit could overtake the goroutines that Main starts.
	if err := n.api.ping(); err != nil {
		return errors.Join(err, n.Stop())
	}
	return nil
}

// open starts one run.
func (n *NSQD) open() (*run, error) {
	opts, err := n.opts.build(n.id)
	if err != nil {
		return nil, err
	}
	log := newLogSink(n.opts.Logf)
	opts.Logger = log
	relays, lookupds, err := relayAll(opts.NSQLookupdTCPAddresses)
	if err != nil {
		return nil, err
	}
	opts.NSQLookupdTCPAddresses = lookupds
	opts.HTTPAddress = behindRelay
	if opts.BroadcastHTTPPort, err = portOf(n.opts.HTTPAddress); err != nil {
		closeAll(relays)
		return nil, err
	}
	daemon, err := openNSQD(opts)
	if err != nil {
		closeAll(relays)
		return nil, err
	}
	http, err := newProxy(n.opts.HTTPAddress, daemon.RealHTTPAddr().String())
	if err != nil {
		closeAll(relays)
		daemon.Exit()
		return nil, err
	}
	if n.tcpAddr == "" { // later starts have the same addresses, and others may be reading them
		n.Node = Node{tcpAddr: daemon.RealTCPAddr().String(), api: newAPI(http.Addr())}
	}
	return startRun(daemon, append(relays, http), log), nil
}

// openNSQD makes an nsqd that listens and has read what an earlier one left in its directory.
func openNSQD(opts *nsqd.Options) (*nsqd.NSQD, error) {
	daemon, err := nsqd.New(opts)
	if err != nil {
		return nil, err
	}
	if err := daemon.LoadMetadata(); err != nil {
		daemon.Exit()
		return nil, err
	}
	return daemon, nil
}

// Stop ends nsqd in order, as SIGTERM does: it closes all connections and writes what it holds in memory, messages in flight
// included, to disk. It waits for that for up to 10s. On a stopped nsqd it does nothing.
func (n *NSQD) Stop() error {
	n.mu.Lock()
	r := n.run
	n.mu.Unlock()
	defer n.api.disconnect()
	return r.stop(stopTimeout)
}

// Restart starts nsqd again, with the same addresses, directory and options. It stops it before, if it runs.
func (n *NSQD) Restart() error {
	n.mu.Lock()
	closed := n.closed
	n.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if err := n.Stop(); err != nil {
		return err
	}
	return n.start()
}

// Close stops nsqd for good and removes its directory, unless DataPath named it. It may be called twice.
func (n *NSQD) Close() error {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	return errors.Join(n.Stop(), os.RemoveAll(n.tempDir))
}
