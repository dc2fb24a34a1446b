package nsqtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"
)

// Node is what can be asked of a running nsqd, whichever way it was started; [NSQD] and [NSQDProcess] are one each. Its
// addresses stay the same over restarts. All methods talk to nsqd's HTTP interface, wait for its answer for up to 10s, and may
// be called from several goroutines. What nsqd refuses is a *[StatusError].
type Node struct {
	tcpAddr string
	api     api
}

// TCPAddr returns the "host:port" that consumers and producers connect to.
func (n *Node) TCPAddr() string { return n.tcpAddr }

// HTTPAddr returns the "host:port" of the HTTP interface.
func (n *Node) HTTPAddr() string { return n.api.addr }

// Publish puts one message into a topic, which is created if need be. The body must not be empty.
func (n *Node) Publish(topic string, body []byte) error {
	return n.api.post("/pub", topicQuery(topic), body)
}

// DeferredPublish is Publish with a delay, in whole milliseconds, before a consumer can get the message.
func (n *Node) DeferredPublish(topic string, delay time.Duration, body []byte) error {
	query := topicQuery(topic)
	query.Set("defer", strconv.FormatInt(delay.Milliseconds(), 10))
	return n.api.post("/pub", query, body)
}

// MultiPublish puts several messages into a topic, all of them or none. No body must be empty.
func (n *Node) MultiPublish(topic string, bodies [][]byte) error {
	query := topicQuery(topic)
	query.Set("binary", "true")
	return n.api.post("/mpub", query, encodeMessages(bodies))
}

// encodeMessages writes what follows MPUB and its length: a count, then each message with its length before it.
func encodeMessages(bodies [][]byte) []byte {
	data := binary.BigEndian.AppendUint32(nil, uint32(len(bodies)))
	for _, body := range bodies {
		data = binary.BigEndian.AppendUint32(data, uint32(len(body)))
		data = append(data, body...)
	}
	return data
}

// CreateTopic makes a topic, if there is none of the name.
func (n *Node) CreateTopic(topic string) error {
	return n.api.post("/topic/create", topicQuery(topic), nil)
}

// DeleteTopic removes a topic with its channels and messages, and closes the connections of its consumers.
func (n *Node) DeleteTopic(topic string) error {
	return n.api.post("/topic/delete", topicQuery(topic), nil)
}

// EmptyTopic drops the messages that no channel has taken yet.
func (n *Node) EmptyTopic(topic string) error {
	return n.api.post("/topic/empty", topicQuery(topic), nil)
}

// PauseTopic keeps a topic's messages from its channels.
func (n *Node) PauseTopic(topic string) error {
	return n.api.post("/topic/pause", topicQuery(topic), nil)
}

// UnpauseTopic undoes PauseTopic.
func (n *Node) UnpauseTopic(topic string) error {
	return n.api.post("/topic/unpause", topicQuery(topic), nil)
}

// CreateChannel makes a channel and, unlike nsqd itself, its topic too.
func (n *Node) CreateChannel(topic, channel string) error {
	if err := n.CreateTopic(topic); err != nil {
		return err
	}
	return n.api.post("/channel/create", channelQuery(topic, channel), nil)
}

// DeleteChannel removes a channel with its messages, and closes the connections of its consumers.
func (n *Node) DeleteChannel(topic, channel string) error {
	return n.api.post("/channel/delete", channelQuery(topic, channel), nil)
}

// EmptyChannel drops all messages of a channel, those in flight and deferred ones too.
func (n *Node) EmptyChannel(topic, channel string) error {
	return n.api.post("/channel/empty", channelQuery(topic, channel), nil)
}

// PauseChannel stops deliveries to the consumers of a channel. They stay connected.
func (n *Node) PauseChannel(topic, channel string) error {
	return n.api.post("/channel/pause", channelQuery(topic, channel), nil)
}

// UnpauseChannel undoes PauseChannel.
func (n *Node) UnpauseChannel(topic, channel string) error {
	return n.api.post("/channel/unpause", channelQuery(topic, channel), nil)
}

// Stats returns all that nsqd tells about its topics, channels and connections.
func (n *Node) Stats() (Stats, error) { return n.stats(url.Values{}) }

// TopicStats returns one topic with its channels. The error is an [ErrNotFound] if there is none.
func (n *Node) TopicStats(topic string) (TopicStats, error) {
	s, err := n.stats(topicQuery(topic))
	if err != nil {
		return TopicStats{}, err
	}
	if len(s.Topics) == 0 {
		return TopicStats{}, fmt.Errorf("%w: topic %q", ErrNotFound, topic)
	}
	return s.Topics[0], nil
}

// ChannelStats returns one channel with its connections. The error is an [ErrNotFound] if there is none.
func (n *Node) ChannelStats(topic, channel string) (ChannelStats, error) {
	s, err := n.stats(channelQuery(topic, channel))
	if err != nil {
		return ChannelStats{}, err
	}
	if len(s.Topics) == 0 || len(s.Topics[0].Channels) == 0 {
		return ChannelStats{}, fmt.Errorf("%w: topic %q, channel %q", ErrNotFound, topic, channel)
	}
	return s.Topics[0].Channels[0], nil
}

func (n *Node) stats(query url.Values) (Stats, error) {
	query.Set("format", "json")
	query.Set("include_mem", "false")
	var s Stats
	err := n.api.get("/stats", query, &s)
	return s, err
}

// announceTopic comes and goes to give nsqd something to tell nsqlookupd.
const announceTopic = "nsqtest-announce#ephemeral"

// Announce makes nsqd register with its nsqlookupds now. Call it when an nsqlookupd has come up after nsqd, or again after a restart:
// by itself nsqd notices at its next ping, which comes every 15s, and may need two of them. The registration follows in a moment, not
// before Announce returns.
func (n *Node) Announce() error {
	// Two events: a lost connection is noticed by the first and opened again by the second.
	return errors.Join(n.CreateTopic(announceTopic), n.DeleteTopic(announceTopic))
}
