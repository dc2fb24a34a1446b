package soak

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

// consumer is one in this process or in one of its own.
type consumer struct {
	config workerConfig
	ledger *ledger
	book   *book
	worker *worker // in this process
	child  *child
}

func (c *consumer) name() string { return c.config.Name }

// kinds are the consumers that there are at any time; each may be replaced by another of its kind.
var kinds = []struct {
	name       string
	child      bool
	discovered bool
	backoff    bool
	// One of these at the start, and all of them in turn while it runs.
	maxInFlight []int
}{
	{name: "here", discovered: true, maxInFlight: []int{30, 3, 60, 0, 1, 10}},
	{name: "here, direct, with backoff", backoff: true, maxInFlight: []int{12, 40}},
	{name: "child", child: true, discovered: true, maxInFlight: []int{50, 2, 20, 0}},
	{name: "child, direct", child: true, maxInFlight: []int{2}}, // connections take turns
	{name: "child with backoff", child: true, discovered: true, backoff: true, maxInFlight: []int{25}},
}

func (s *soak) newConsumer(kind int, r lane) *consumer {
	k := kinds[kind]
	s.generation++
	cfg := workerConfig{
		Name:         fmt.Sprintf("%s #%d", k.name, s.generation),
		MaxInFlight:  k.maxInFlight[0],
		MaxInFlights: k.maxInFlight,
		ChangeEvery:  r.between(100*time.Millisecond, 600*time.Millisecond),
		Handlers:     16,
		Backoff:      k.backoff,
		Seed:         s.seed,
		Verbose:      *verbose,
	}
	if len(k.maxInFlight) == 1 {
		cfg.ChangeEvery = 0
	}
	if k.discovered {
		cfg.Lookupds = s.cluster.lookupdHTTPAddrs()
	} else {
		cfg.NSQDs = s.cluster.addrs()
	}
	c := &consumer{config: cfg, ledger: s.ledger, book: s.ledger.openBook(cfg.Name)}
	var err error
	if k.child {
		c.config.Journal = filepath.Join(s.dir, fmt.Sprintf("journal-%d", s.generation))
		c.child, err = startChild(c.config, func(e event) { s.ledger.enter(c.book, e) })
	} else {
		c.worker, err = startWorker(cfg, bookJournal{s.ledger, c.book})
	}
	if err != nil {
		s.ledger.fail("%s doesn't start: %v", cfg.Name, err)
	}
	return c
}

// stop stops it in order.
func (c *consumer) stop() {
	defer c.ledger.closeBook(c.book)
	if c.worker != nil {
		c.worker.stop()
	}
	if c.child == nil {
		return
	}
	// Beside its own bounds, it needs a moment to end.
	if err := c.child.stop(shutdownTimeout + 3*slack); err != nil {
		c.ledger.fail("%s: %v", c.name(), err)
	}
}

func (c *consumer) kill() {
	defer c.ledger.closeBook(c.book)
	c.ledger.killed(c.book)
	if err := c.child.kill(); err != nil {
		c.ledger.fail("%s: %v", c.name(), err)
	}
}

// child is a consumer in a process of its own: this test binary once more.
type child struct {
	cmd    *exec.Cmd
	stdin  io.Closer // its end tells the child to stop; the system closes it if this process dies
	exited chan struct{}
	err    error // set before exited is closed

	take    func(event)
	mu      sync.Mutex // guards journal
	journal *journalReader
	wg      sync.WaitGroup
}

func startChild(cfg workerConfig, take func(event)) (*child, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	c := &child{cmd: exec.Command(program), exited: make(chan struct{}), take: take}
	if c.journal, err = openJournalReader(cfg.Journal); err != nil {
		return nil, err
	}
	c.cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	c.cmd.Stdout, c.cmd.Stderr = os.Stdout, os.Stderr
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.exited)
	}()
	c.wg.Go(c.follow)
	return c, nil
}

// follow reads the journal while the child runs.
func (c *child) follow() {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if err := c.read(); err != nil {
				c.take(event{kind: eventViolation, text: err.Error()})
				return
			}
		case <-c.exited:
			return
		}
	}
}

func (c *child) read() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.journal.read(c.take)
}

func (c *child) stop(limit time.Duration) error {
	c.stdin.Close()
	select {
	case <-c.exited:
	case <-time.After(limit):
		return fmt.Errorf("the process has not ended %s after it was told to (%v)", limit, c.kill())
	}
	if err := c.close(); err != nil {
		return err
	}
	return c.err
}

// kill is SIGKILL.
func (c *child) kill() error {
	if err := c.cmd.Process.Kill(); err != nil {
		return err
	}
	<-c.exited
	return c.close()
}

// close reads what the journal has left.
func (c *child) close() error {
	c.wg.Wait()
	err := c.read()
	c.stdin.Close()
	c.journal.file.Close()
	os.Remove(c.journal.file.Name())
	return err
}
