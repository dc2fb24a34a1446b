package nsqtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"
)

// ErrNotRunning is returned by calls that need a running process.
var ErrNotRunning = errors.New("nsqtest: nsqd is not running")

// startTimeout is how long a new process may take until nsqd listens.
const startTimeout = 30 * time.Second

// NSQDProcess is an nsqd in a process of its own: see the package's page for how. Its methods may be called from several goroutines,
// but Restart only from one at a time.
type NSQDProcess struct {
	Node

	opts    NSQDOptions // with the addresses and the directory in use
	id      int64
	tempDir string // removed by Close; may be empty

	mu     sync.Mutex // guards the fields below
	child  *child     // the current or last process
	closed bool
}

// StartNSQDProcess starts an nsqd as a process that is killed when the test ends; a failure ends the test. At most one NSQDOptions
// may be given; its Tune is called in this process, and may set nothing but plain values. nsqd answers requests once
// StartNSQDProcess returns.
func StartNSQDProcess(tb TB, opts ...NSQDOptions) *NSQDProcess {
	tb.Helper()
	o := optional(opts)
	if o.DataPath == "" {
		o.DataPath = tb.TempDir()
	}
	p, err := NewNSQDProcess(o)
	if err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	closeAfter(tb, "nsqd process", p.Close)
	return p
}

// NewNSQDProcess starts an nsqd as a process, which runs until Stop, Kill or Close, and not longer than this process.
func NewNSQDProcess(opts NSQDOptions) (*NSQDProcess, error) {
	p := &NSQDProcess{opts: opts, id: nextNodeID()}
	var err error
	if p.tempDir, err = prepare(&p.opts); err != nil {
		return nil, err
	}
	if err := p.start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.tempDir))
	}
	return p, nil
}

func (p *NSQDProcess) start() error {
	var c *child
	var addrs childAddrs
	err := startOn([]string{p.opts.TCPAddress, p.opts.HTTPAddress}, func() (err error) {
		c, addrs, err = p.spawn()
		return err
	})
	if err != nil {
		return fmt.Errorf("nsqtest: starting nsqd: %w", err)
	}
	if p.tcpAddr == "" { // later starts have the same addresses, and others may be reading them
		p.Node = Node{tcpAddr: addrs.TCP, api: newAPI(addrs.HTTP)}
	}
	p.mu.Lock()
	p.child = c
	p.mu.Unlock()
	if err := p.api.ping(); err != nil {
		return errors.Join(err, p.Kill())
	}
	return nil
}

func (p *NSQDProcess) spawn() (*child, childAddrs, error) {
	opts, err := p.opts.build(p.id)
	if err != nil {
		return nil, childAddrs{}, err
	}
	opts.Logger = nil
	config, err := json.Marshal(opts)
	if err != nil {
		return nil, childAddrs{}, err
	}
	return spawn(string(config), newLogSink(p.opts.Logf))
}

func (p *NSQDProcess) current() *child {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.child
}

// PID returns the process ID of the current or last process.
func (p *NSQDProcess) PID() int { return p.current().cmd.Process.Pid }

// Running tells whether the process runs; a frozen one does.
func (p *NSQDProcess) Running() bool { return p.current().running() }

// Kill ends the process at once, as SIGKILL does: nsqd writes nothing more, and loses what it holds in memory. It returns when the
// process is gone. On one that has ended it does nothing.
func (p *NSQDProcess) Kill() error {
	defer p.api.disconnect()
	return p.current().kill()
}

// Stop ends nsqd in order, as SIGTERM does: see [NSQD.Stop]. After 3s it ends even if a connection is in the way: everything is on disk by
// then. If it doesn't end within 10s, as when it is frozen, it is killed, which is an error.
func (p *NSQDProcess) Stop() error {
	defer p.api.disconnect()
	return p.current().stop()
}

// Freeze stops the process from running, as SIGSTOP does: its connections stay open and nothing answers. It returns when the process
// stands still. On a frozen process it does nothing. The error is an errors.ErrUnsupported where the system has no such
// thing (Windows), and [ErrNotRunning] if the process has ended.
func (p *NSQDProcess) Freeze() error {
	c := p.current()
	if !c.running() {
		return ErrNotRunning
	}
	if !c.frozen.CompareAndSwap(false, true) {
		return nil // a second stop would not be reported
	}
	return freeze(c.cmd.Process)
}

// Thaw lets a frozen process go on, as SIGCONT does. On one that isn't frozen it does nothing. The errors are those of Freeze.
func (p *NSQDProcess) Thaw() error {
	c := p.current()
	if !c.running() {
		return ErrNotRunning
	}
	c.frozen.Store(false)
	return thaw(c.cmd.Process)
}

// Restart starts nsqd again, with the same addresses, directory and options. It stops it before, if it runs.
func (p *NSQDProcess) Restart() error {
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if err := p.Stop(); err != nil {
		return err
	}
	return p.start()
}

// Close kills the process and removes its directory, unless DataPath named it. It may be called twice.
func (p *NSQDProcess) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	return errors.Join(p.Kill(), os.RemoveAll(p.tempDir))
}

// child is one nsqd process, from its start to its end.
type child struct {
	cmd    *exec.Cmd
	stdin  io.Closer // its end tells nsqd to end; the system closes it if this process dies
	log    *logSink
	frozen atomic.Bool   // by Freeze
	exited chan struct{} // closed when the process is gone and its output read
	err    error         // of the process; written before exited is closed
}

// spawn starts this program once more, as an nsqd, and waits until it listens.
func spawn(config string, log *logSink) (*child, childAddrs, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, childAddrs{}, err
	}
	out := newChildOutput(log)
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), childEnv+"="+config)
	cmd.Stdout = out
	cmd.Stderr = out
	separate(cmd)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, childAddrs{}, err
	}
	if err := cmd.Start(); err != nil {
		return nil, childAddrs{}, err
	}
	c := &child{cmd: cmd, stdin: stdin, log: log, exited: make(chan struct{})}
	go func() {
		c.err = cmd.Wait()
		close(c.exited)
	}()
	addrs, err := c.awaitReady(out)
	return c, addrs, err
}

func (c *child) awaitReady(out *childOutput) (childAddrs, error) {
	timeout := time.NewTimer(startTimeout)
	defer timeout.Stop()
	select {
	case addrs := <-out.ready:
		return addrs, nil
	case <-c.exited:
		return childAddrs{}, fmt.Errorf("the process ended: %w\n%s", c.err, out.tail())
	case <-timeout.C:
		err := fmt.Errorf("the process is not ready after %s\n%s", startTimeout, out.tail())
		return childAddrs{}, errors.Join(err, c.kill())
	}
}

func (c *child) running() bool {
	select {
	case <-c.exited:
		return false
	default:
		return true
	}
}

func (c *child) kill() error {
	err := c.cmd.Process.Kill()
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-c.exited
	c.log.close()
	return nil
}

func (c *child) stop() error {
	c.stdin.Close()
	timeout := time.NewTimer(stopTimeout)
	defer timeout.Stop()
	select {
	case <-c.exited:
		c.log.close()
		return nil
	case <-timeout.C:
		return errors.Join(errStopTimeout, c.kill())
	}
}
