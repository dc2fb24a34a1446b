package nsq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"
)

// DiscoveryFilter may be given to SetBehaviorDelegate. Filter gets the addresses that nsqlookupds list and returns those
// to connect to: fewer of them, or others in their place, for example where a broadcast address means nothing outside of
// its network. It is called by one goroutine at a time, often with the addresses of a single nsqlookupd; while it runs no
// other discovery goes on. After a panic, which is logged, nothing changes.
type DiscoveryFilter interface {
	Filter([]string) []string
}

const (
	// firstLookupWait is how long Connect calls wait for what discovery brings.
	firstLookupWait = 2 * time.Second

	// roundLimit is how long a poll waits for a slow nsqlookupd before it goes on without.
	roundLimit = 5 * time.Second

	// retryGap is the least time between polls that are made for nsqds which failed more than once.
	retryGap = 2 * time.Second

	// vanishPolls is how many good polls in a row must have missed an nsqd before it is closed.
	vanishPolls = 3

	// usualPoll is a little less than the default poll interval: of polls in quicker succession not all are logged.
	usualPoll = 50 * time.Second

	// persistentLookupFailures is from how many failures in a row on they are errors and no longer warnings.
	persistentLookupFailures = 3
)

// lookups is what a consumer knows of its nsqlookupds. Fields are guarded by Consumer.mu if nothing else is said.
type lookups struct {
	list    []*lookupd
	filter  DiscoveryFilter
	client  *http.Client // in use
	own     *http.Client // never changed
	started bool

	kick    chan struct{}     // size 1: lookupdLoop shall see what is due
	results chan lookupResult // to lookupdLoop
	running sync.WaitGroup    // lookupdLoop and queries; added to under Consumer.mu while not stopping, or by lookupdLoop
}

func (l *lookups) init(cfg *Config) {
	l.own = newLookupdClient(cfg.LookupdPollTimeout)
	l.client = l.own
	l.kick = make(chan struct{}, 1)
	l.results = make(chan lookupResult)
}

func (l *lookups) setClient(c *http.Client) {
	l.client = c
	if c == nil {
		l.client = l.own
	}
}

// wakeUp has lookupdLoop see what is due. It never blocks.
func (l *lookups) wakeUp() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

func (l *lookups) close() { l.own.CloseIdleConnections() }

// lookupd is one nsqlookupd.
type lookupd struct {
	addr string // as configured
	url  *url.URL

	asked    chan struct{} // closed when the first answer, good or not, has been dealt with
	asking   bool          // a query is under way
	askedAt  time.Time     // the last one
	everAsk  bool
	skipped  int      // producers in the last answer that could not be dialled; owned by lookupdLoop
	listed   []string // by the last good answer
	since    time.Time
	lastOK   time.Time
	lastErr  error
	failures int       // in a row
	failing  time.Time // when the first of them came
	notFound bool      // the last good answer was that it doesn't know the topic
	askGate  logGate   // of queries
	lastSaid string    // the last error that was logged, without its numbers; owned by lookupdLoop, like what follows
	errGate  logGate   // of errors that are others than the last one
}

// lookupResult is the outcome of one query.
type lookupResult struct {
	from   *lookupd
	answer lookupAnswer
	err    error
}

// ConnectToNSQLookupd adds an nsqlookupd: host:port of its HTTP side, or a URL. It is asked at once, and then polled every
// Config.LookupdPollInterval, for nsqds that have the topic; the consumer connects to all that any nsqlookupd lists.
//
// The call waits for the first answer and the connects it leads to, two seconds at most; how they went is in Status and
// in the log, not in the error. A known address is nothing to do.
//
// Errors, in this order: "consumer stopped"; "no handlers", or what was wrong with AddHandler; "missing port" or an
// *AddressError.
func (r *Consumer) ConnectToNSQLookupd(addr string) error {
	return r.ConnectToNSQLookupds([]string{addr})
}

// ConnectToNSQLookupds adds several nsqlookupds, which are asked at the same time. Those with a wrong address are left
// out. A single error is returned as it is, several are joined. See ConnectToNSQLookupd.
func (r *Consumer) ConnectToNSQLookupds(addresses []string) error {
	errs := make([]error, len(addresses))
	var added []*lookupd
	r.mu.Lock()
	if err := r.readyLocked(); err != nil && len(addresses) > 0 {
		r.mu.Unlock()
		return err // once, not for each
	}
	for i, addr := range addresses {
		l, err := r.addLookupdLocked(addr)
		errs[i] = err
		if l != nil {
			added = append(added, l)
		}
	}
	r.mu.Unlock()
	if len(added) > 0 {
		r.lookups.wakeUp()
		r.awaitFirstLookup(added)
	}
	return joinErrors(errs)
}

// addLookupdLocked returns nil with nil for a known address.
func (r *Consumer) addLookupdLocked(addr string) (*lookupd, error) {
	u, err := parseLookupdAddress(addr)
	if err != nil {
		return nil, err
	}
	if r.lookups.find(u) >= 0 {
		return nil, nil
	}
	r.startLocked()
	l := &lookupd{addr: addr, url: u, asked: make(chan struct{}), since: time.Now()}
	l.askGate = logGate{interval: usualPoll}
	l.errGate = logGate{interval: usualPoll, burst: persistentLookupFailures}
	r.lookups.list = append(r.lookups.list, l)
	if !r.lookups.started {
		r.lookups.started = true
		r.lookups.running.Go(r.lookupdLoop)
	}
	return l, nil
}

func (l *lookups) find(u *url.URL) int {
	return slices.IndexFunc(l.list, func(o *lookupd) bool { return o.url.String() == u.String() })
}

// awaitFirstLookup waits until new nsqlookupds have answered and the nsqds they brought are connected, or could not be.
func (r *Consumer) awaitFirstLookup(added []*lookupd) {
	timeout := time.NewTimer(firstLookupWait)
	defer timeout.Stop()
	wait := func(ch <-chan struct{}) bool {
		select {
		case <-ch:
			return true
		case <-timeout.C:
		case <-r.ctx.Done():
		}
		return false
	}
	for _, l := range added {
		if !wait(l.asked) {
			return
		}
	}
	for _, tried := range r.connecting() {
		if !wait(tried) {
			return
		}
	}
}

// connecting returns channels that close when the connects under way are over.
func (r *Consumer) connecting() (tried []chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.nodes {
		if n.tried != nil {
			tried = append(tried, n.tried.over)
		}
	}
	return tried
}

// DisconnectFromNSQLookupd removes an nsqlookupd. nsqds that no other one lists are closed after a while, like those
// that vanish. It returns ErrNotConnected for an unknown address, and an error for the last one: stop the consumer
// instead.
func (r *Consumer) DisconnectFromNSQLookupd(addr string) error {
	u, err := parseLookupdAddress(addr)
	r.mu.Lock()
	defer r.mu.Unlock()
	i := -1
	if err == nil {
		i = r.lookups.find(u)
	}
	if i < 0 {
		return ErrNotConnected
	}
	if len(r.lookups.list) == 1 {
		return fmt.Errorf("cannot disconnect from only remaining nsqlookupd HTTP address %s", shownAddress(addr))
	}
	r.lookups.list = slices.Delete(r.lookups.list, i, i+1)
	return nil
}

// lookupRound is one poll of all nsqlookupds, owned by lookupdLoop.
type lookupRound struct {
	open     bool
	all      bool // all were asked; else only new ones
	good     bool // all that were asked have given a good answer so far
	answered bool // one has given a good answer
	waiting  map[*lookupd]bool
	deadline time.Time
}

// lookupdLoop asks all nsqlookupds at the same time, once per poll interval and when an nsqd it knows from them is due
// for another try. It never waits for one of them, nor for a connect: answers come in as results.
func (r *Consumer) lookupdLoop() {
	var round lookupRound
	var lastRound, nextPoll time.Time
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-r.lookups.kick:
		case <-timer.C:
		case res := <-r.lookups.results:
			r.applyLookup(res, &round)
		}

		now := time.Now()
		if round.open && (len(round.waiting) == 0 || !now.Before(round.deadline)) {
			r.endRound(&round)
		}
		// While some are slow to answer, an nsqd that was lost since they were asked does not wait for them.
		var retry time.Time
		if lost := round.open && (round.answered || !round.all); lost || !round.open {
			retry = r.nextRetry(lost, lastRound)
		}
		pollDue := !round.open && !now.Before(nextPoll)
		if pollDue || !retry.IsZero() && !now.Before(retry) {
			if pollDue {
				nextPoll = now.Add(r.pollInterval(nextPoll.IsZero()))
			}
			lastRound, retry = now, time.Time{}
			r.startRound(&round, now)
		}
		r.askNew(&round, now)

		next := nextPoll
		switch {
		case round.open && len(round.waiting) == 0: // there was nobody to ask
			next = now
		case round.open: // the poll that is due meanwhile waits for its end
			next = round.deadline
		}
		next = earliest(next, retry)
		timer.Reset(max(next.Sub(now), 0))
	}
}

// pollInterval is the time to the next poll. To the second one it is longer by a random part, which keeps consumers that
// were started together apart from then on.
func (r *Consumer) pollInterval(first bool) time.Duration {
	d := r.config.LookupdPollInterval
	if first {
		d += time.Duration(rand.Float64() * r.config.LookupdPollJitter * float64(d))
	}
	return d
}

// nextRetry is when the first discovered nsqd that is down is due for another try; with lost, the first of those that
// went down after the last round began. Each try takes a poll, but a rack that is down shall not have every consumer
// flood the nsqlookupds: only a first try comes quickly.
func (r *Consumer) nextRetry(lost bool, lastRound time.Time) (t time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.nodes {
		if !n.discovered || n.serving || lost && !n.since.After(lastRound) {
			continue
		}
		gap := r.config.ReconnectInterval
		if n.failures > 1 {
			gap = max(gap, min(retryGap, r.config.MaxReconnectInterval))
		}
		t = earliest(t, latest(n.nextTry, lastRound.Add(gap)))
	}
	return t
}

// startRound asks all nsqlookupds. One that still owes the last answer is not asked again: that answer is waited for, as
// long as for those of one round, but it makes this one no good poll.
func (r *Consumer) startRound(round *lookupRound, now time.Time) {
	*round = lookupRound{open: true, all: true, good: true, waiting: make(map[*lookupd]bool), deadline: now.Add(r.roundLimit())}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lookups.list {
		if l.asking {
			round.good = false
			if now.Sub(l.askedAt) < r.roundLimit() {
				round.waiting[l] = true
			}
			continue
		}
		r.askLocked(l, round)
	}
}

func (r *Consumer) roundLimit() time.Duration {
	if d := r.config.LookupdPollTimeout; d > 0 {
		return min(d, roundLimit)
	}
	return roundLimit
}

// askNew asks nsqlookupds that were added since, without a poll of the others.
func (r *Consumer) askNew(round *lookupRound, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lookups.list {
		if l.everAsk {
			continue
		}
		if !round.open {
			*round = lookupRound{open: true, waiting: make(map[*lookupd]bool), deadline: now.Add(r.roundLimit())}
		}
		r.askLocked(l, round)
	}
}

// askLocked starts a query.
func (r *Consumer) askLocked(l *lookupd, round *lookupRound) {
	l.asking, l.everAsk, l.askedAt = true, true, time.Now()
	lvl := LogLevelDebug
	if ok, _ := l.askGate.allow(l.askedAt); ok {
		lvl = LogLevelInfo
	}
	round.waiting[l] = true
	secret := ""
	if r.config.LookupdAuthorization {
		secret = r.config.AuthSecret
	}
	client := r.lookups.client
	r.lookups.running.Go(func() {
		r.log.logf(lvl, "querying nsqlookupd %s", lookupdName(l.url))
		ctx := r.ctx
		if d := r.config.LookupdPollTimeout; client.Timeout == 0 && d > 0 { // one of the user's
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		answer, err := r.query(ctx, client, l.url, secret)
		select {
		case r.lookups.results <- lookupResult{l, answer, err}:
		case <-r.ctx.Done():
		}
	})
}

// clientGrace is how long a stop waits for the user's http.Client to notice that its context has ended.
const clientGrace = 50 * time.Millisecond

// query is queryLookupd, but the user's http.Client may panic, and ignore that its context has ended.
func (r *Consumer) query(ctx context.Context, client *http.Client, u *url.URL, secret string) (lookupAnswer, error) {
	if client == r.lookups.own {
		return queryLookupd(ctx, client, u, r.topic, secret)
	}
	done := make(chan lookupResult, 1)
	go func() {
		res := lookupResult{err: errors.New("nsq: the http.Client ended its goroutine")}
		defer func() {
			if p := recover(); p != nil {
				res = lookupResult{err: fmt.Errorf("nsq: the http.Client panicked: %v\n%s", p, debug.Stack())}
			}
			done <- res
		}()
		res.answer, res.err = queryLookupd(ctx, client, u, r.topic, secret)
	}()
	select {
	case res := <-done:
		return res.answer, res.err
	case <-r.ctx.Done():
	}
	grace := time.NewTimer(clientGrace)
	defer grace.Stop()
	select {
	case res := <-done:
		return res.answer, res.err
	case <-grace.C:
		return lookupAnswer{}, context.Cause(r.ctx)
	}
}

// applyLookup takes one answer: what it lists is connected at once, whatever the others do.
func (r *Consumer) applyLookup(res lookupResult, round *lookupRound) {
	l := res.from
	notFound := errors.Is(res.err, errTopicNotFound)
	good := res.err == nil || notFound
	r.mu.Lock()
	l.asking = false
	removed := !slices.Contains(r.lookups.list, l)
	firstAnswer := l.lastOK.IsZero() && l.failures == 0
	newlyNotFound := notFound && !l.notFound
	if good {
		l.lastOK, l.lastErr, l.failures, l.notFound = time.Now(), nil, 0, notFound
		if len(res.answer.addrs) > 0 || res.answer.skipped == 0 { // else it says that there are nsqds, and not where
			l.listed = res.answer.addrs
		}
	} else {
		l.lastErr = res.err
		if l.failures++; l.failures == 1 {
			l.failing = time.Now()
		}
	}
	failures := l.failures
	r.mu.Unlock()

	if good && l.lastSaid != "" && !removed {
		l.lastSaid = ""
		r.log.logf(LogLevelInfo, "nsqlookupd %s answers again", lookupdName(l.url))
	}
	switch {
	case removed:
		res.answer = lookupAnswer{} // nobody wants to know any more
	case newlyNotFound:
		r.log.logf(LogLevelInfo, "nsqlookupd %s does not know topic %s yet", lookupdName(l.url), r.topic)
	case !good:
		r.logLookupFailure(l, res.err, failures)
	}
	if n := res.answer.skipped; n > 0 && n != l.skipped {
		r.log.logf(LogLevelWarning, "nsqlookupd %s lists %s that can't be dialled: %s", lookupdName(l.url), counted(n, "nsqd"), res.answer.reason)
	}
	l.skipped = res.answer.skipped
	if good {
		wanted, ok := r.filtered(res.answer.addrs)
		r.connectTo(wanted)
		good = ok && res.answer.skipped == 0
	}
	if firstAnswer {
		close(l.asked)
	}
	if round.open && round.waiting[l] {
		delete(round.waiting, l)
		round.good = round.good && (good || removed)
		round.answered = round.answered || good
	}
}

// logLookupFailure logs the first failures, and of those that follow each one whose number is a power of two, or that is
// another one than before. They are errors once they have gone on for longer than a poll interval: lost nsqds make for polls in quick succession.
func (r *Consumer) logLookupFailure(l *lookupd, err error, failures int) {
	if r.ctx.Err() != nil {
		return
	}
	said := withoutNumbers(err.Error())
	wanted := failures <= persistentLookupFailures || failures&(failures-1) == 0
	if !wanted && said != l.lastSaid {
		wanted, _ = l.errGate.allow(time.Now())
	}
	if !wanted {
		return
	}
	l.lastSaid = said
	lvl := LogLevelWarning
	if failures >= persistentLookupFailures && time.Since(l.failing) >= r.config.LookupdPollInterval {
		lvl = LogLevelError
	}
	r.log.logf(lvl, "error querying nsqlookupd (%s) - %s", lookupdName(l.url), err)
}

// withoutNumbers takes the digits out of an error's text: the ports of this end differ from try to try.
func withoutNumbers(text string) string {
	return strings.Map(func(r rune) rune {
		if '0' <= r && r <= '9' {
			return -1
		}
		return r
	}, text)
}

// filtered passes addresses through the user's filter and drops what can't be dialled. It returns false if the filter
// failed: then nothing is known.
func (r *Consumer) filtered(addresses []string) (wanted []string, ok bool) {
	r.mu.Lock()
	filter := r.lookups.filter
	r.mu.Unlock()
	addresses = slices.Clone(addresses)
	if filter != nil {
		if addresses, ok = r.callFilter(filter, addresses); !ok {
			return nil, false
		}
	}
	for _, addr := range addresses {
		if _, _, err := parseNSQDAddress(addr); err != nil {
			if ok, more := r.leftOutGate.allow(time.Now()); ok {
				r.log.logf(LogLevelWarning, "discovered address left out: %s%s", err, alsoSuppressed(more))
			}
			continue
		}
		wanted = append(wanted, addr)
	}
	return wanted, true
}

// callFilter returns false if the filter panicked, or is still at it when the consumer stops.
func (r *Consumer) callFilter(f DiscoveryFilter, addresses []string) (wanted []string, ok bool) {
	done := make(chan bool, 1)
	var result []string
	go func() {
		returned := false
		defer func() {
			if !returned {
				r.log.logf(LogLevelError, "DiscoveryFilter panicked (%v)\n%s", recover(), debug.Stack())
			}
			done <- returned
		}()
		result = f.Filter(addresses)
		returned = true
	}()
	select {
	case ok = <-done:
		return result, ok
	case <-r.ctx.Done():
		return nil, false
	}
}

// connectTo connects to those of the addresses that are not connected yet, unless their next try is still to come.
func (r *Consumer) connectTo(addresses []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		return
	}
	for _, addr := range addresses {
		n := r.nodes[addr]
		if n == nil {
			n = r.addNodeLocked(addr)
		}
		n.discovered = true
		n.missing = 0
		if !n.serving && !time.Now().Before(n.nextTry) {
			r.tryLocked(n)
		}
	}
}

// endRound ends a poll of all: what only nsqlookupds list that did not answer, by their last answer, is connected too,
// and what nobody lists any more is closed in time.
func (r *Consumer) endRound(round *lookupRound) {
	round.open = false
	good := round.good && len(round.waiting) == 0
	r.mu.Lock()
	var known []string
	seen := make(map[string]bool)
	for _, l := range r.lookups.list {
		for _, addr := range l.listed {
			if !seen[addr] {
				seen[addr] = true
				known = append(known, addr)
			}
		}
	}
	r.mu.Unlock()
	if !round.all {
		return
	}
	wanted, ok := r.filtered(known)
	if !ok {
		r.postponeRetries()
		return
	}
	r.connectTo(wanted)
	for _, c := range r.vanished(wanted, good) {
		c.log.logf(LogLevelInfo, "no nsqlookupd lists this nsqd any more")
		r.closeConn(c)
	}
}

// postponeRetries puts off what is due but could not be decided, so that it does not lead to the next poll at once.
func (r *Consumer) postponeRetries() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for _, n := range r.nodes {
		if n.discovered && !n.serving && !now.Before(n.nextTry) {
			n.nextTry = now.Add(r.config.MaxReconnectInterval)
		}
	}
}

// vanished forgets the nodes that are no longer wanted, and returns their connections. A poll that was not good can
// hide an nsqd, so it does not count.
func (r *Consumer) vanished(wanted []string, good bool) (conns []*Conn) {
	listed := make(map[string]bool, len(wanted))
	for _, addr := range wanted {
		listed[addr] = true
	}
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		return nil
	}
	for _, n := range r.nodes {
		switch {
		case listed[n.addr] || !n.discovered:
			n.missing = 0
			continue
		case n.direct:
			n.discovered, n.missing = false, 0
			continue
		case !n.serving: // down, and not to be connected from memory
			r.dropLocked(n)
			continue
		case !good:
			continue
		}
		if n.missing == 0 || n.conn != nil && n.conn.heardSince(n.missingSince) {
			n.missing, n.missingSince = 0, now // its messages say that it is there
		}
		n.missing++
		if n.missing >= vanishPolls && now.Sub(n.missingSince) >= r.config.VanishTimeout {
			if c := r.dropLocked(n); c != nil {
				conns = append(conns, c)
			}
		}
	}
	return conns
}

// heardSince tells whether a message came after t.
func (c *Conn) heardSince(t time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return instant(c.lastRead).After(t)
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
